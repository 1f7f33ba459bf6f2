"""Trainers train as one process does, alone and sharded, in drawn steps; a mistake in each is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import trainer_defects
from verification.models import Setup, check_model

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize(
    "trainer",
    ["transformers_trainer", "trl_sft", "trl_reward", "trl_grpo", "lightning_trainer", "peft_lora", "accelerate_loop"],
)
def test_sound_trainers_hold(trainer: str, tmp_path: Path) -> None:
    name = f"verification.models.trainers.{trainer}:Llama"
    check_model(name, examples=15, worlds=(1, 2, 4), failures=tmp_path)


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (trainer_defects.DividedTwice, "loss of step one"),
        (trainer_defects.SameBatches, "logits"),
        (trainer_defects.Unfrozen, "gradients at the optimizer"),
        (trainer_defects.SharesDividedTwice, "loss of step one"),
        (trainer_defects.DocumentsJoined, "logits"),
        (trainer_defects.MeanOfMeans, "gradients at the optimizer"),
        (trainer_defects.MeanOfRanks, "evaluation"),
        (trainer_defects.EvaluatedByBatches, "evaluation"),
        (trainer_defects.LastOfShard, "loss of step one"),
        (trainer_defects.PaddingScored, "loss of step one"),
        (trainer_defects.NotRolledBack, "loss of step one"),
        (trainer_defects.RewardsOfFirst, "loss of step one|gradients at the optimizer"),
        (trainer_defects.TokensOfRank, "loss of step one|gradients at the optimizer"),
        (trainer_defects.WithoutMomenta, "losses, norms of later steps|parameters after the last"),
    ],
)
def test_mistakes_in_trainers_are_found(setup: type[Setup], said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"counter-example: ({said}) \(wrong result"):
        check_model(setup, examples=60, worlds=(2,), failures=tmp_path)
