"""Runs of transformers' Trainer with a small model in fp64: alone on one process, and sharded on ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorWithFlattening,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

from ring.integrations.trainers.trainer import ContextParallelTrainer

VOCABULARY = 19
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Run:
    """A run. world, context: ranks, those that share sequences. batch, held: sequences of a step's micro-batch over all
    data ranks, sequences of the evaluation. settings: TrainingArguments. model: in MODELS. same_bits: its trainer's."""

    world: int
    context: int
    collator: str = "equal"
    loss: str = "plain"
    batch: int = 2
    sequences: int = 12
    held: int = 5
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    same_bits: int | None = None

    @property
    def data(self) -> int:
        return self.world // self.context


class Sequences(Dataset[dict[str, list[int]]]):
    """Drawn sequences, with ever fewer labels; their lengths are equal or drawn."""

    def __init__(self, number: int, seed: int, equal: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows: list[dict[str, list[int]]] = []
        for row in range(number):
            length = 23 if equal else int(torch.randint(3, 24, (), generator=draw))
            tokens = torch.randint(1, VOCABULARY, (length,), generator=draw)
            ignored = torch.rand(length, generator=draw) > 1 - 0.9 * row / number
            labels = tokens.masked_fill(ignored, -100)
            self.rows.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return self.rows[row]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad on the right, with a mask, as collators with a tokenizer do."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[int(i < len(row["input_ids"])) for i in range(longest)] for row in rows])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": mask}


def packed_rows(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pack each sequence as two documents, cut at a place of its own: rows of different documents."""
    batch = padded(rows)
    del batch["attention_mask"]
    n = batch["input_ids"].shape[1]
    cuts = torch.tensor([1 + row["input_ids"][0] % (n - 1) for row in rows])[:, None]
    places = torch.arange(n)[None]
    positions = torch.where(places < cuts, places, places - cuts)
    return batch | {"labels": batch["labels"].masked_fill(positions == 0, -100), "position_ids": positions}


def typed(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Add the types of BERT's tokens: the first five are of another sentence."""
    batch = padded(rows)
    return batch | {"token_type_ids": (torch.arange(batch["input_ids"].shape[1]) > 4).long().expand_as(batch["labels"])}


COLLATORS: dict[str, Any] = {
    "equal": None, "padded": padded, "packed rows": packed_rows, "typed": typed,
    "packed": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}  # fmt: skip


def in_fp64(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None, ahead: int = 1) -> Tensor:
    """Compute the loss, which transformers computes in fp32, in the dtype of the logits. ahead: 0 for labels of the
    tokens themselves."""
    logits, targets = outputs.logits[:, : -ahead or None].flatten(0, 1), labels[:, ahead:].flatten()
    total = functional.cross_entropy(logits, targets, reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def right(prediction: EvalPrediction) -> dict[str, float]:
    """Fold the logits and labels of all tokens, in their order, into numbers. Logits at padding have no meaning."""
    logits, labels, tokens = prediction.predictions, prediction.label_ids, prediction.inputs
    assert logits.shape[:2] == labels.shape == tokens.shape
    kept, places = labels[:, 1:] != -100, 1.0 + np.arange(labels.size).reshape(labels.shape)
    return {
        "hits": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[kept].mean()),
        "logits": float((logits.sum(-1) * np.sin(places))[tokens > 0].sum()),  # 0 and -100 are padding
        "labels": float((labels * np.sin(places)).sum()),
    }


def llama() -> LlamaForCausalLM:
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


def modernbert() -> ModernBertForMaskedLM:
    torch.manual_seed(11)
    return ModernBertForMaskedLM(ModernBertConfig(**SIZES, pad_token_id=0, local_attention=8)).double()


def roberta() -> RobertaForMaskedLM:
    torch.manual_seed(11)
    return RobertaForMaskedLM(RobertaConfig(**SIZES, **NO_DROPOUT, pad_token_id=0)).double()


def bert() -> BertForTokenClassification:
    torch.manual_seed(11)
    return BertForTokenClassification(BertConfig(**SIZES, **NO_DROPOUT, num_labels=VOCABULARY)).double()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama, "modernbert": modernbert, "roberta": roberta, "bert": bert,
}  # fmt: skip


def arguments(run: Run, folder: str, data: int, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": run.batch // data, "per_device_eval_batch_size": run.batch // run.data,
        "num_train_epochs": 2, "learning_rate": 0.01, "adam_epsilon": 1e-3, "weight_decay": 0.1,
        "save_strategy": "no", "include_num_input_tokens_seen": "non_padding", "max_grad_norm": 0.5,
        "logging_nan_inf_filter": False, "include_for_metrics": ["inputs"],
        "label_smoothing_factor": 0.1 if run.loss == "smoothed" else 0.0,
    }  # fmt: skip
    return TrainingArguments(**(options | run.settings | changes))


def begin(run: Run) -> None:
    """Make accelerate see these ranks, and forget others."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(run.world)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)


def trainer_of(run: Run, folder: str, **changes: Any) -> Any:
    """Make the Trainer: sharded on ranks, and transformers' own in one process."""
    begin(run)
    sharded = dist.is_initialized()
    equal = run.collator == "equal"
    options: dict[str, Any] = {
        "train_dataset": Sequences(run.sequences, 1, equal), "eval_dataset": Sequences(run.held, 2, equal),
        "data_collator": COLLATORS[run.collator], "compute_metrics": right,
    }  # fmt: skip
    if run.loss == "own" or (run.loss == "plain" and not sharded):
        options["compute_loss_func"] = partial(in_fp64, ahead=int(run.model == "llama"))
    args, model = arguments(run, folder, run.data if sharded else 1, **changes), MODELS[run.model]()
    if sharded:
        return ContextParallelTrainer(model, args, context_size=run.context, same_bits=run.same_bits, **options)
    return Trainer(model, args, **options)


def results(trainer: Any) -> dict[str, Any]:
    """Return all that a user sees of a training, but times."""
    logs = [{k: v for k, v in log.items() if not k.endswith(("time", "second"))} for log in trainer.state.log_history]
    weights = {
        name: x.detach().clone() for name, x in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    return {"logs": logs, "weights": weights, "tokens": trainer.state.num_input_tokens_seen}


def trained(run: Run, folder: str) -> dict[str, Any]:
    """Train and evaluate."""
    trainer = trainer_of(run, folder)
    trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    own = {k: v for k, v in evaluated.items() if not k.endswith(("time", "second"))}
    return results(trainer) | {"evaluated": own, "label_ids": predicted.label_ids}
