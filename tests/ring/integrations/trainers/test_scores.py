"""TRL's RewardTrainer with sharded sequences: scores are those of the last tokens of whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)
from trl import RewardConfig, RewardTrainer

from ring.integrations.trainers.scores import of_last_tokens
from ring.integrations.transformers import restored
from tests.ring.integrations.trainers.test_trainer import assert_same
from tests.support import trl_runs
from tests.support.ranks import Ranks
from tests.support.trainer_runs import SIZES, VOCABULARY, Run
from tests.support.trl_runs import slow_but, trainer_of

pytestmark = pytest.mark.ranks


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
    lengths = torch.randint(1, longest, (number, 2), generator=draw).tolist()
    rows = [[torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in pair] for pair in lengths]
    return Dataset.from_list(
        [{"chosen_ids": chosen, "rejected_ids": other, "margin": 0.1 * n} for n, (chosen, other) in enumerate(rows)]
    )


def in_fp64(rotary: Any, _: Any, given: dict[str, Tensor], __: Any) -> tuple[Tensor, Tensor]:
    """Rotate in fp64. Angles in fp32, as transformers has them, are other ones for a row that begins elsewhere."""
    angles = (given["position_ids"][..., None] * rotary.inv_freq.double()).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def _trained(run: Run, folder: str) -> dict[str, Any]:
    longest, model = 5 if run.model == "qwen3" else 23, model_of(run.model)
    trainer = trainer_of(
        run, folder, RewardTrainer, RewardConfig, model, train_dataset=_pairs(run.sequences, longest),
        eval_dataset=_pairs(8, longest), settings={"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4},
    )  # fmt: skip
    if run.collator == "left":
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: {k: x.flip(1) if x.dim() == 2 else x for k, x in collate(rows).items()}
        model.base_model.rotary_emb.register_forward_hook(in_fp64, with_kwargs=True)
    found = trl_runs.trained(trainer)
    tokens = torch.tensor([[3, 4, 5, 0], [3, 4, 0, 0]])
    with torch.no_grad(), restored(trainer._attending()) if dist.is_initialized() else torch.no_grad():
        scores = trainer.accelerator.unwrap_model(trainer.model)(tokens, attention_mask=(tokens > 0).long()).logits
    return found | {"scores": scores}


@pytest.mark.parametrize("name", slow_but(("padded", "data ranks"), RUNS))
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RUNS[name]
    expected = _trained(run, str(tmp_path / "alone"))
    assert any(log.get("grad_norm", 0) > 1e-3 for log in expected["logs"])
    for log in expected["logs"] if run.data > 1 else ():
        log.pop("total_flos", None)  # counts the padding of each batch
    for got in ranks(run.world).run(_trained, run, str(tmp_path / "sharded")):
        assert_same(got, expected, 1e-6)  # logs are rounded to fp32
        assert_same(got["weights"], expected["weights"], 1e-12)


def test_the_last_token_is_the_last_that_is_no_padding() -> None:
    tokens = torch.tensor([[3, 4, 0, 0], [0, 0, 3, 4], [3, 0, 4, 0]])
    scores = torch.arange(12.0).view(3, 4, 1)
    assert of_last_tokens(scores, tokens, 0).flatten().tolist() == [1, 7, 10]
    assert of_last_tokens(scores[:1], tokens[:1], None).tolist() == [[3]]
