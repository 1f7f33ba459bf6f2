"""A run finds a planted fault, shrinks it, saves it, and a replay finds it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
from rich.console import Console
from torch import Tensor, hub

from tests.support.training_cases import small_step
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend, Unavailable
from verification.runner import Profile, RunPlan
from verification.training import saved_training
from verification.training.rank import rank_step
from verification.training.rank.graphs import Graphs
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD, run_training

SHORT = Profile("for tests", 40, budget=600)  # whatever shrinks, shrinks to its end


def gloo(prepare: Callable[[], None] | None = None) -> GlooBackend:
    return GlooBackend(10.0, prepare, TRAINING_PRELOAD)


def quiet() -> Report:
    return Report(Console(quiet=True))


def _plant_loss_of_steps() -> None:
    """From the second step on, the loss is noted a thousandth too large."""
    real = rank_step.take_gradients

    def spoiled(*arguments: Any) -> Tensor:
        losses = real(*arguments)
        return losses if arguments[-1] is not None else losses * 1.001

    rank_step.take_gradients = spoiled  # type: ignore[assignment]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_without_faults_holds_and_keeps_every_deviation(tmp_path: Path) -> None:
    data = run_training(RunPlan((1, 2), SHORT, 15, 3, "gloo", tmp_path), quiet(), gloo()).to_dict()
    assert data["held"] and data["examples"] == 30 and data["distributed"] == 15
    assert data["coverage"]["cases"] == 30 and data["coverage"]["features"]["wrapper ddp"] > 0
    kept = {(entry["property"], entry["world"]): entry for entry in data["deviations"] if entry["dtype"] == "float64"}
    assert 0 < len(kept["gradients after step one", 2]["ratios"]) <= 15
    assert max(kept["gradients after step one", 2]["ratios"]) < 1e-2, "rounding is far below what is allowed"
    assert data["tolerance"]["float64"] == 1e-9
    json.dumps(data, allow_nan=False)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_wrong_loss_is_found_shrunk_saved_and_replayed(tmp_path: Path) -> None:
    plan = RunPlan((2,), SHORT, None, 7, "gloo", tmp_path)
    first, *_ = run_training(plan, quiet(), gloo(_plant_loss_of_steps)).failures
    assert (first.kind, first.broken, first.world) == ("wrong result", "losses, norms of later steps", 1)
    case = TrainingCase.from_dict(first.record["training"])
    assert (case.steps, case.model.layers, case.accumulation, case.wrapper) == (2, 1, 1, "none")
    file = Path(shlex.split(first.replay)[-1])
    assert TrainingCase.from_dict(json.loads(file.read_text())["training"]) == case
    again = replay(file, quiet(), gloo(_plant_loss_of_steps))
    assert [failure.broken for failure in again.failures] == ["losses, norms of later steps"]
    assert not replay(file, quiet(), gloo()).failures, "without the fault it holds"


@pytest.mark.parametrize(
    ("changes", "backend", "said"),
    [
        ({}, SimBackend, "argument --backend: a training step runs on gloo or nccl, got sim"),
        ({"world": 65}, GlooBackend, "world is 65; it must be an integer from 1 to 64"),
        ({"calls": ["a mask"]}, GlooBackend, "calls beside the steps are tests of tests/ring/nn now"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, changes: Any, backend: Any, said: str) -> None:
    assert saved_training.TRAINING.name == "training steps"
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"training": small_step(2).to_dict() | changes}))
    with pytest.raises(Unavailable, match=said):
        replay(file, quiet(), backend())


def test_models_are_compiled_where_tqdm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.hub has a bar of its own there."""
    monkeypatch.setattr(hub, "tqdm", hub._Faketqdm)
    with torch._dynamo.config.patch(recompile_limit=8):  # it sets another
        assert Graphs("aot_eager").runs == 0
