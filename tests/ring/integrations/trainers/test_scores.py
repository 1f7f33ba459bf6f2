"""TRL's RewardTrainer with sharded sequences: scores are those of the last tokens of whole sequences."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)
from trl import RewardConfig, RewardTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from ring.integrations.transformers import restored
from tests.ring.integrations.trainers.test_trainer import assert_same
from tests.support.ranks import Ranks
from tests.support.trainer_runs import SIZES, VOCABULARY, Run, begin, results

pytestmark = pytest.mark.ranks


class Sharded(ContextParallelTrainer, RewardTrainer):  # type: ignore[misc]
    """The class that a user writes."""


RUNS = {
    "padded": Run(2, 2),
    "adapters": Run(2, 2, "adapters"),
    "data ranks": Run(4, 2, batch=4, sequences=16, settings={"center_rewards_coefficient": 0.1}),
    "more ranks than tokens": Run(4, 4, model="qwen3", settings={"activation_checkpointing": True}),
    "left": Run(2, 2, "left"),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(11)
    sizes = SIZES | {"num_labels": 1, "pad_token_id": 0}
    if name == "qwen3":
        return Qwen3ForSequenceClassification(Qwen3Config(**sizes, head_dim=8)).double()
    return LlamaForSequenceClassification(LlamaConfig(**sizes)).double()


def _pairs(number: int, longest: int) -> Dataset:
    draw = torch.Generator().manual_seed(number)

    def sequence() -> list[int]:
        return torch.randint(
            1, VOCABULARY, (int(torch.randint(1, longest, (), generator=draw)),), generator=draw
        ).tolist()

    rows = [{"chosen_ids": sequence(), "rejected_ids": sequence(), "margin": 0.1 * n} for n in range(number)]
    return Dataset.from_list(rows)


def rotate_in_fp64(model: PreTrainedModel) -> None:
    """Rotate in fp64. Angles in fp32, as transformers has them, are other ones for a row that begins elsewhere."""

    def rotations(rotary: Any, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * rotary.inv_freq.double()).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.base_model.rotary_emb.forward = MethodType(rotations, model.base_model.rotary_emb)


def _on_the_left(collate: Any) -> Any:
    def collated(rows: Any) -> dict[str, Any]:
        return {name: x.flip(1) if x.dim() == 2 else x for name, x in collate(rows).items()}

    return collated


def _trained(run: Run, folder: str) -> dict[str, Any]:
    begin(run)
    sharded = dist.is_initialized()
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word1"))
    data = run.data if sharded else 1
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "per_device_train_batch_size": run.batch // data, "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 4 // data, "num_train_epochs": 1, "learning_rate": 0.01, "adam_epsilon": 1e-3,
        "max_grad_norm": 0.5, "save_strategy": "no",
    }  # fmt: skip
    longest = 5 if run.model == "qwen3" else 23
    options: dict[str, Any] = {
        "train_dataset": _pairs(run.sequences, longest), "eval_dataset": _pairs(8, longest),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1"),
    }  # fmt: skip
    if run.collator == "adapters":
        options["peft_config"] = LoraConfig("SEQ_CLS", r=2, init_lora_weights=False, target_modules="all-linear")
    args = RewardConfig(**(settings | run.settings))
    model = model_of(run.model)
    trainer: Any = (Sharded if sharded else RewardTrainer)(
        model, args, **options, **({"context_size": run.context} if sharded else {})
    )
    if run.collator == "left":
        trainer.data_collator = _on_the_left(trainer.data_collator)
        rotate_in_fp64(model)
    trainer.train()
    evaluated = trainer.evaluate()
    tokens = torch.tensor([[3, 4, 5, 0], [3, 4, 0, 0]])
    with torch.no_grad(), restored(trainer._attending()) if sharded else torch.no_grad():
        scores = trainer.accelerator.unwrap_model(trainer.model)(tokens, attention_mask=(tokens > 0).long()).logits
    return results(trainer) | {"eval_loss": evaluated["eval_loss"], "scores": scores}


QUICK = ("padded", "data ranks")
LOGGED = 1e-6  # logs are rounded to fp32


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RUNS[name]
    expected = _trained(run, str(tmp_path / "alone"))
    assert any(log.get("grad_norm", 0) > 1e-3 for log in expected["logs"])
    for log in expected["logs"] if run.data > 1 else ():
        log.pop("total_flos", None)  # counts the padding of each batch
    for got in ranks(run.world).run(_trained, run, str(tmp_path / "sharded")):
        assert_same(got, expected, LOGGED)
        assert_same(got["weights"], expected["weights"], 1e-12)
