"""transformers' Trainer with sharded sequences: steps, logs, evaluations and checkpoints of one process; refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    T5Config,
    T5ForConditionalGeneration,
)

from reference.pattern import Pattern
from ring.integrations import transformers
from ring.integrations.trainers.call import ShardedCall
from ring.integrations.trainers.trainer import ContextParallelTrainer
from tests.support import trainer_runs
from tests.support.framework_example import EXACT, ROUNDED
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks
from tests.support.trainer_runs import SIZES, Run, Sequences, arguments, begin, llama, trained, trainer_of

pytestmark = pytest.mark.ranks

# The Trainer adds and logs losses in fp32, and transformers smooths labels in the dtype of the logits.
RUNS = {
    "two ranks": Run(2, 2),
    "more ranks than tokens": Run(4, 4, "padded", sequences=6, settings={"max_steps": 3}),
    "accumulation, whose last step is shorter": Run(2, 2, settings={"gradient_accumulation_steps": 4}),
    "data ranks, repeated in evaluation": Run(4, 2, batch=4, settings={"gradient_accumulation_steps": 2}),
    "padding on data ranks": Run(4, 2, "padded", batch=4, held=6, settings={"gradient_accumulation_steps": 2}),
    "packed": Run(4, 4, "packed", batch=3, settings={"gradient_accumulation_steps": 2}),
    "packed on data ranks": Run(4, 2, "packed", batch=4, held=8),
    "rows packed from other documents": Run(2, 2, "packed rows", settings={"gradient_accumulation_steps": 2}),
    "masked": Run(2, 2, "padded", settings={"gradient_accumulation_steps": 2}, model="modernbert"),
    "masked, positions from padding": Run(4, 2, "padded", batch=4, model="roberta"),
    "classes of tokens": Run(4, 2, "typed", batch=4, held=6, model="bert"),
    "classes of tokens, without padding": Run(4, 4, "equal", "own", model="bert"),
    "a loss of one's own": Run(4, 2, "padded", "own", batch=4, settings={"gradient_accumulation_steps": 2}),
    "smoothed labels": Run(2, 2, "padded", "smoothed", settings={"gradient_accumulation_steps": 2}),
    "the mean over a rank alone": Run(
        2, 2, "padded", settings={"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}
    ),
    "incomplete batches left out": Run(4, 2, batch=4, settings={"dataloader_drop_last": True}),
    "evaluation between steps": Run(
        2, 2, settings={"eval_strategy": "steps", "eval_steps": 5, "train_sampling_strategy": "sequential"}
    ),
}


def assert_same(got: Any, expected: Any, bound: float, where: str = "") -> None:
    """Compare nested results: numbers to within the bound, everything else exactly."""
    if isinstance(expected, Mapping):
        assert set(expected) <= set(got), (where, sorted(set(expected) - set(got)))
        for key, value in expected.items():
            assert_same(got[key], value, bound, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(got[number], value, bound, f"{where}.{number}")
    elif isinstance(expected, float | Tensor | np.ndarray):
        got, expected = torch.as_tensor(got), torch.as_tensor(expected)
        assert got.shape == expected.shape, where
        worst = float((got - expected).abs().max()) if expected.numel() else 0.0
        assert worst <= bound * max(1.0, float(expected.abs().max())), (where, worst)
    else:
        assert got == expected, where


@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RUNS[name]
    expected = trained(run, str(tmp_path / "alone"))
    if run.collator in ("padded", "typed") and run.data > 1:
        del expected["logs"][-2]["total_flos"]  # counts padding, of which one batch of all rows has more
    for got in ranks(run.world).run(trained, run, str(tmp_path / "sharded")):
        for key, value in expected.items():
            assert_same(got[key], value, ROUNDED if key == "logs" else EXACT, key)


def _saved(folder: str, adapters: bool) -> None:
    run = Run(2, 2, settings={"max_steps": 2})
    begin(run)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = adapted(config) if adapters else llama()
    ContextParallelTrainer(model, arguments(run, folder, 1), context_size=2).save_model()


@pytest.mark.parametrize("adapters", [False, True])
def test_a_saved_model_is_loaded_without_the_ring(adapters: bool, ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_saved, str(tmp_path), adapters)
    model, tokens = llama(), torch.arange(8)[None]
    before = model(tokens).logits
    loaded = PeftModel.from_pretrained(model, str(tmp_path)) if adapters else LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation != "ring" and torch.equal(loaded(tokens).logits, before) != adapters


def _prepared(folder: str) -> None:
    run = Run(2, 2)
    begin(run)
    model = transformers.prepare(llama(), compare=False)
    with mock.patch.object(transformers, "Comparison", side_effect=AssertionError):
        ContextParallelTrainer(model, arguments(run, folder, 1), context_size=2)


def test_a_model_that_is_prepared_is_not_compared_again(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_prepared, str(tmp_path))


class OwnLoss(ContextParallelTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        assert model.eval() is model and not self.model.training and model.train().config is self.model.config
        logits = model(inputs["input_ids"], inputs.get("attention_mask")).logits
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        assert torch.equal(outputs.logits, logits) and logits.shape[:2] == inputs["input_ids"].shape
        return (loss, outputs) if return_outputs else loss


def masked(rows: Any) -> dict[str, Tensor]:
    tokens = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(tokens.shape) < 0.5, -100)}


def _losses(kind: type[ContextParallelTrainer], bert: bool, folder: str) -> list[Any]:
    run = Run(2, 2, settings={"max_steps": 3})
    begin(run)
    data: Any = {"train_dataset": Sequences(6, 1, True), "eval_dataset": Sequences(3, 2, True)}
    model = BertForMaskedLM(BertConfig(**SIZES, attention_probs_dropout_prob=0.0)) if bert else llama()
    data["data_collator"] = masked if bert else None
    trainer = kind(model, arguments(run, folder, 1), context_size=2, **data)
    trainer.train()
    trainer.evaluate()
    return [log.get("loss", log.get("eval_loss")) for log in trainer.state.log_history]


def test_a_loss_of_a_subclass_gets_a_call_like_the_model(ranks: Ranks, tmp_path: Path) -> None:
    plain, own = (ranks(2).run(_losses, kind, False, str(tmp_path)) for kind in (ContextParallelTrainer, OwnLoss))
    assert own == plain


def test_collators_draw_apart_from_dropout(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(_losses, ContextParallelTrainer, True, str(tmp_path))
    assert first == second


def test_each_call_has_dropout_of_its_own() -> None:
    model, unused = torch.nn.Dropout(), mock.Mock()
    call = ShardedCall(model, unused, unused, True, True, model, torch.Generator())
    first, second = (call._called(input=torch.ones(64)) for _ in range(2))
    assert not torch.equal(first, second)


def test_other_trainers_come_second() -> None:
    with pytest.raises(TypeError, match=r"write class Sharded\(ContextParallelTrainer, Seq2SeqTrainer\)"):
        type("Sharded", (Seq2SeqTrainer, ContextParallelTrainer), {})


class Endless(IterableDataset[dict[str, list[int]]]):
    def __iter__(self) -> Any:
        return iter(Sequences(6, 1, True).rows)


def adapted(config: PeftConfig) -> PeftModel:
    return get_peft_model(llama(), config)


CHUNKS: dict[str, Any] = {"same_bits": 16}
# Settings, other arguments of the trainer, and a word of the refusal.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "context_size": ({}, {"context_size": 3}, "context_size must divide the 2 ranks, got 3"),
    "no context_size": ({}, {"context_size": 0}, "context_size must be a positive integer, got 0"),
    "torch_compile": ({"torch_compile": True}, {}, "torch_compile must be left out"),
    "noise": ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha must be left out"),
    "liger": ({"use_liger_kernel": True}, {}, "use_liger_kernel must be left out"),
    "batch size": ({"auto_find_batch_size": True}, {}, "auto_find_batch_size must be left out"),
    "objects": ({"eval_use_gather_object": True}, {}, "eval_use_gather_object must be left out"),
    "lengths": ({"train_sampling_strategy": "group_by_length"}, {}, "train_sampling_strategy must be one of"),
    "label names": ({"label_names": ["classes"]}, {}, "label_names must be \\['labels'\\]"),
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, {}, "accelerator_config must have neither"),
    "FSDP1": ({"fsdp": True, "fsdp_config": {"version": 1}}, {}, "fsdp_config must have version 2, got 1"),
    "FSDP2 on CPUs": ({"fsdp": True}, {}, "fsdp needs GPUs"),
    "DeepSpeed": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, {}, "deepspeed must be left out"),
    "cp_size": ({"parallelism_config": ParallelismConfig(cp_size=2)}, {}, "parallelism_config must be left out"),
    "iterable": ({"max_steps": 2}, {"train_dataset": Endless()}, "train_dataset must have a length"),
    "iterable, evaluated": ({}, {"eval_dataset": {"other": Endless()}}, "other must have a length"),
    "pooled": (
        {},
        {"model": lambda: BertForSequenceClassification(BertConfig(**SIZES))},
        "model must be a language model, causal or masked, or a token classifier, got BertForSequenceClassification",
    ),
    "the last token": (
        {},
        {"model": lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES))},
        "got LlamaForSequenceClassifi",
    ),
    "no loss type": ({}, {"model": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1))}, "loss_type = 'ForCausalLM'"),
    "another sequence": (
        {},
        {"model": lambda: T5ForConditionalGeneration(T5Config(vocab_size=19))},
        "got T5ForConditionalGeneration",
    ),
    "prompts": ({}, {"model": lambda: adapted(PromptTuningConfig(TaskType.CAUSAL_LM, num_virtual_tokens=2))}, "LORA"),
    "invocations": (
        {},
        {"model": lambda: adapted(LoraConfig(task_type=TaskType.CAUSAL_LM, alora_invocation_tokens=[3]))},
        "adapters of PEFT must be LORA, .*, got LORA with alora_invocation_tokens in 'default'",
    ),
    "model_init": (
        {},
        {"model": None, "model_init": llama},
        "model must be given as a PreTrainedModel, got model_init",
    ),
    "half a chunk": ({}, {"same_bits": 24}, "same_bits must be None or the tokens of a chunk, a multiple of 16"),
    "FSDP2 of chunks": ({"fsdp": True}, CHUNKS, "fsdp must be left out with same_bits"),
    "smoothed chunks": ({"label_smoothing_factor": 0.1}, CHUNKS, "label_smoothing_factor must be left out with same"),
    "means of ranks": ({"average_tokens_across_devices": False}, CHUNKS, "average_tokens_across_devices must be True"),
    "an own loss of chunks": ({}, CHUNKS | {"compute_loss_func": trainer_runs.in_fp64}, "that of compute_loss_func"),
    "an own compute_loss": ({}, CHUNKS | {"kind": OwnLoss}, "compute_loss must be that of transformers' Trainer or"),
    "masked, of chunks": ({}, CHUNKS | {"model": trainer_runs.modernbert}, "model must be a causal language model"),
    "repeated": ({"dataloader_drop_last": True, "per_device_train_batch_size": 3}, CHUNKS, "a multiple of 3, per_dev"),
}


def _refused(name: str, folder: str) -> str:
    settings, options, _ = REFUSED[name]
    run = Run(2, 2, settings=settings)
    begin(run)
    make = options.get("model", llama)
    with pytest.raises((ValueError, NotImplementedError)) as refused:
        given: dict[str, Any] = {"context_size": 2, "train_dataset": Sequences(4, 1, True), **options}
        kind = given.pop("kind", ContextParallelTrainer)
        kind(args=arguments(run, folder, 1), **(given | {"model": make and make()}))
    dist.barrier()  # the group stays usable
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name_on_every_rank(name: str, ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(2).run(_refused, name, str(tmp_path))
    assert len(set(said)) == 1
    with pytest.raises(AssertionError, match=REFUSED[name][2]):
        raise AssertionError(said[0])


def test_one_process_without_torchrun_is_refused(tmp_path: Path) -> None:
    begin(Run(1, 1))
    with pytest.raises(ValueError, match="context_size needs torch.distributed: start the script with torchrun"):
        ContextParallelTrainer(llama(), arguments(Run(1, 1), str(tmp_path), 1), context_size=1)


def _with_batch(run: Run, folder: str, changes: dict[str, Any], rank: int | None) -> str:
    trainer = trainer_of(run, folder)
    collate = trainer.data_collator

    def collated(rows: Any) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = collate(rows)
        return batch | changes if rank in (None, dist.get_rank()) else batch

    trainer.data_collator = collated
    answer = said(trainer.train)
    dist.barrier()
    return answer


TOKENS = torch.arange(46).view(2, 23) % 19
TREE = Pattern.tree([None, 0, 0], [11, 6, 6])
LEFT = torch.tensor([[0] + [1] * 22, [0, 0] + [1] * 21])
BATCHES: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "another argument": ({"token_type_ids": TOKENS}, None, "token_type_ids must be left out"),
    "hidden states": ({"output_hidden_states": True}, None, "output_hidden_states must be left out"),
    "types of images": ({"mm_token_type_ids": TOKENS}, 2, "mm_token_type_ids must be left out"),
    "a tree": ({"pattern": TREE}, None, "pattern must be left out of the model's call: masks of images"),
    "depths of a tree": ({"position_ids": TREE.positions(23).expand(2, 23)}, 1, "positions must be 0 or the previous"),
    "a mask of pairs": ({"attention_mask": TOKENS.new_ones(2, 1, 23, 23)}, None, "attention_mask must"),
    "a mask of rows": ({"attention_mask": TOKENS.new_ones(2, 23, 23).tril()}, None, "attention_mask must"),
    "a short mask": ({"attention_mask": TOKENS.new_ones(2, 22)}, None, "attention_mask must have the layout's 23"),
    "on one rank": ({"pixel_values": TOKENS}, 3, "got pixel_values: let the collator omit it"),
    "other batches": ({"input_ids": TOKENS}, 1, "tokens must be the same on every rank"),
    "other lengths of labels": ({"labels": TOKENS[:, 1:]}, 0, "labels must have the shape of input_ids"),
    "labels across documents": (
        {"labels": TOKENS, "position_ids": torch.arange(46).view(2, 23) % 23 % 20}, None, "labels must be -100",
    ),
    "other ends": ({"cu_seq_lens_q": torch.tensor([0, 9, 46])}, None, "cu_seq_lens_q must be the ends of documents"),
    "padding on the left": ({"attention_mask": LEFT}, 1, "labels must be -100 for the first token behind padding"),
    "padding between": ({"attention_mask": LEFT.roll(3, 1)}, 1, "attention_mask must have its zeros on the right, or"),
    "a mask of other values": ({"attention_mask": 2 * LEFT}, 3, "attention_mask must be None or this rank's shard"),
    "a mask of other lengths": ({"attention_mask": LEFT[:, 1:]}, 0, "attention_mask must have the layout's 23 tokens"),
    "positions": ({"position_ids": TOKENS + 2}, 2, "positions must be 0 or the previous one plus 1"),
    "no tensor": ({"attention_mask": [[1] * 23] * 2}, 1, "attention_mask must be a tensor, got <class 'list'>"),
    "positions of three axes": ({"position_ids": TOKENS.expand(3, 2, 23)}, 2,
                                "position_ids must have the shape of input_ids, (2, 23), got (3, 2, 23)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_refused_on_every_rank(name: str, ranks: Ranks, tmp_path: Path) -> None:
    changes, rank, words = BATCHES[name]
    (answer,) = set(ranks(4).run(_with_batch, Run(4, 2, batch=4), str(tmp_path), changes, rank))
    assert words in answer


def _packed_evaluation(folder: str) -> str:
    trainer = trainer_of(Run(4, 2, "packed", batch=4, held=6), folder)
    with pytest.raises(ValueError) as refused:
        trainer.evaluate()
    dist.barrier()
    return str(refused.value)


def test_repeated_sequences_within_a_packed_row_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(4).run(_packed_evaluation, str(tmp_path))
    assert len(set(said)) == 1 and "eval_dataset must have a length that is a multiple of 4" in said[0]
