"""TRL's SFTTrainer with sharded sequences, padded and packed: what it logs is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from tests.ring.integrations.trainers.test_trainer import assert_same
from tests.support.ranks import Ranks
from tests.support.trainer_runs import VOCABULARY, Run, Sequences, begin, in_fp64, llama, results

pytestmark = pytest.mark.ranks

# TRL projects to logits in fp32, so gradients have its rounding: 2^-24 of sums of 32 products, below 1e-5 of a norm. A
# step of Adam with eps 1e-3 is no steeper than 10 gradients at a rate of 0.01, so weights of 0.02 to 1 keep it.
IN_FP32 = 1e-5
RUNS = {
    "packed": Run(2, 2, settings={"packing": True, "eval_packing": True}),
    "packed on data ranks": Run(4, 2, sequences=14, settings={"packing": True}),
    "packed, ends cut off": Run(4, 4, settings={"packing": True, "packing_strategy": "bfd_split", "max_length": 16}),
    "without padding": Run(2, 2, settings={"padding_free": True, "max_length": None}),
    "weighted tokens": Run(2, 2, settings={"packing": True, "loss_type": "dft"}),
    "smoothed labels": Run(2, 2, settings={"packing": True, "label_smoothing_factor": 0.1}),
    "a loss of one's own": Run(2, 2, loss="own", settings={"packing": True}),
    "adapters, packed": Run(4, 2, "adapters", sequences=14, settings={"packing": True}),
    "adapters, recomputed": Run(2, 2, "adapters", settings={"activation_checkpointing": True}),
}


class Sharded(ContextParallelTrainer, SFTTrainer):  # type: ignore[misc]
    """The class that a user writes."""


def _sequences(number: int, seed: int) -> Dataset:
    return Dataset.from_list(Sequences(number, seed, False).rows)


def _trained(run: Run, folder: str) -> dict[str, Any]:
    begin(run)
    sharded = dist.is_initialized()
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word1"))
    data = run.data if sharded else 1
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "per_device_train_batch_size": run.batch // data, "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 0.01, "adam_epsilon": 1e-3,
        "max_grad_norm": 0.5, "save_strategy": "no", "max_length": 32,
    }  # fmt: skip
    options: dict[str, Any] = {
        "train_dataset": _sequences(run.sequences, 1),
        "eval_dataset": _sequences(run.held, 2),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1"),
    }
    if run.collator == "adapters":
        options["peft_config"] = LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, target_modules="all-linear")
    if run.loss == "own":
        options["compute_loss_func"] = in_fp64
    args = SFTConfig(**(settings | run.settings))
    trainer: Any
    if sharded:
        trainer = Sharded(llama(), args, context_size=run.context, same_bits=run.same_bits, **options)
    else:
        trainer = SFTTrainer(llama(), args, **options)
    # Otherwise accelerate repeats a sequence, for a data rank without one.
    assert len(trainer.train_dataset) % run.data == 0
    trainer.train()
    trainer.evaluate()
    return results(trainer)


# Means of a batch's means, or counts of its padding: one batch for each data rank has others.
OF_BATCHES = ("eval_entropy", "eval_mean_token_accuracy", "total_flos")


@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RUNS[name]
    expected = _trained(run, str(tmp_path / "alone"))
    assert all(torch.isfinite(weight).all() for weight in expected["weights"].values())
    for log in expected["logs"] if run.data > 1 else ():
        for key in OF_BATCHES:
            log.pop(key, None)
    for got in ranks(run.world).run(_trained, run, str(tmp_path / "sharded")):
        assert_same(got, expected, IN_FP32)


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "settings"), [(48, {"packing": True}), (36, {"activation_checkpointing": True})])
def test_any_ranks_train_and_log_the_same(
    sequences: int, settings: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    found = []
    for world, context, batch in ((1, 1, 2), (3, 3, 2), (4, 2, 4)):
        own = settings | {"gradient_accumulation_steps": 12 // batch}
        run = Run(world, context, batch=batch, sequences=sequences, held=4, settings=own, same_bits=16)
        found += ranks(world).run(_trained, run, str(tmp_path))
    for one in found:
        assert_same(one["weights"], found[0]["weights"], 0.0)
        for log, other in zip(one["logs"], found[0]["logs"], strict=True):
            assert all(log.get(name) == other.get(name) for name in ("loss", "grad_norm", "eval_loss", "train_loss"))


def _preferred(trained: type[Any], settings: type[Any], adapters: bool, folder: str) -> dict[str, Any]:
    run, sharded = Run(2, 2), dist.is_initialized()
    begin(run)
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    draw = torch.Generator().manual_seed(1)
    texts = [" ".join(f"word{int(i)}" for i in torch.randint(2, 19, (3 + n % 5,), generator=draw)) for n in range(24)]
    rows: list[dict[str, Any]] = [
        {
            "prompt": f"{a} ",
            **({"chosen": b, "rejected": c} if trained is DPOTrainer else {"completion": b, "label": bool(len(c) % 2)}),
        }
        for a, b, c in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]
    args = settings(
        folder, use_cpu=True, bf16=False, report_to="none", logging_steps=1, per_device_train_batch_size=4, max_steps=2,
        learning_rate=0.01, adam_epsilon=1e-3, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    options: dict[str, Any] = {
        "train_dataset": Dataset.from_list(rows),
        "ref_model": llama(),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1"),
    }
    with torch.no_grad():
        options["ref_model"].lm_head.weight *= 2
    if adapters:
        options["peft_config"] = LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
    kind = type("Sharded", (ContextParallelTrainer, trained), {}) if sharded else trained
    trainer = kind(llama(), args=args, **options, **({"context_size": 2} if sharded else {}))
    trainer.train()
    return results(trainer)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("trained", "settings"), [(DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig)])
def test_preferences_are_those_of_one_process(
    trained: type[Any], settings: type[Any], adapters: bool, ranks: Ranks, tmp_path: Path
) -> None:
    expected = _preferred(trained, settings, adapters, str(tmp_path / "alone"))
    for got in ranks(2).run(_preferred, trained, settings, adapters, str(tmp_path / "sharded")):
        assert_same(got, expected, IN_FP32)
