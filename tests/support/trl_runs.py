"""Runs of TRL's trainers with a small model in fp64: alone on one process, and sharded on ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import RewardTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from tests.support.trainer_runs import VOCABULARY, Run, begin, results


def trainer_of(run: Run, folder: str, kind: Any, config: Any, model: Any, **options: Any) -> Any:
    """Make a trainer, sharded on ranks. Its `settings` count batches over all data ranks; the run's come last."""
    begin(run)
    sharded = dist.is_initialized()
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "num_train_epochs": 1, "learning_rate": 0.01, "adam_epsilon": 1e-3, "max_grad_norm": 0.5,
        "save_strategy": "no", "per_device_train_batch_size": run.batch, "per_device_eval_batch_size": 1,
    }  # fmt: skip
    settings |= options.pop("settings", {}) | run.settings
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        settings[name] = max(1, settings[name] // (run.data if sharded else 1))
    if run.collator == "adapters":
        task = "SEQ_CLS" if kind is RewardTrainer else None
        options["peft_config"] = LoraConfig(task, r=2, init_lora_weights=False, target_modules="all-linear")
    options |= {
        "args": config(**settings),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1"),
    }
    if not sharded:
        return kind(model, **options)
    kind = type("Sharded", (ContextParallelTrainer, kind), {})
    return kind(model, context_size=run.context, same_bits=run.same_bits, **options)


def trained(trainer: Any) -> dict[str, Any]:
    """Train, and evaluate where there is a dataset for it; of trainers that generate with the last completions."""
    trainer.train()
    tables = [_completions(trainer)]
    if trainer.eval_dataset is not None:
        trainer.evaluate()
        tables.append(_completions(trainer))
    return results(trainer) | {"tables": tables}


def _completions(trainer: Any) -> list[list[Any]]:
    return [list(x) for x in getattr(trainer, "_logs", {}).values() if isinstance(x, deque)]


def texts(number: int, least: int) -> list[str]:
    """Return drawn texts of so many words or up to four more."""
    draw = torch.Generator().manual_seed(1)
    words = (torch.randint(2, VOCABULARY, (least + n % 5,), generator=draw).tolist() for n in range(number))
    return [" ".join(f"word{word}" for word in text) for text in words]


def slow_but(quick: tuple[str, ...], runs: dict[str, Run]) -> list[Any]:
    """Return the names of runs, all but the quick ones marked as slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in runs]
