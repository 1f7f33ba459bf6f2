"""A run finds planted faults, shrinks them to the smallest model and mesh, saves them; a replay finds them again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.planted_training import (
    plant_death,
    plant_eager_steps,
    plant_forgotten_rank,
    plant_loss_of_steps,
    plant_scale_of_tied_gradients,
    plant_sleep,
)
from tests.support.training_cases import small_step
from verification.replay.replay import replay
from verification.report.counter_example import CounterExample
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend, Unavailable
from verification.runner import Profile, RunPlan
from verification.training import saved_training
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING_PRELOAD, run_training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHORT = Profile("for tests", 40, budget=600)  # whatever shrinks, shrinks to its end


def gloo(prepare: Callable[[], None] | None = None, timeout: float = 10.0) -> GlooBackend:
    return GlooBackend(timeout, prepare, TRAINING_PRELOAD)


def found_by(
    prepare: Callable[[], None], folder: Path, world: int, timeout: float = 10.0, profile: Profile = SHORT
) -> list[CounterExample]:
    plan = RunPlan((world,), profile, None, 7, "gloo", folder)
    return run_training(plan, Report(Console(quiet=True)), gloo(prepare, timeout)).failures


def case_of(found: CounterExample) -> TrainingCase:
    return TrainingCase.from_dict(found.record["training"])


def test_a_run_without_faults_holds_and_keeps_every_deviation(tmp_path: Path) -> None:
    plan = RunPlan((1, 2), SHORT, 15, 3, "gloo", tmp_path)
    report = run_training(plan, Report(Console(quiet=True)), gloo())
    data = report.to_dict()
    assert data["held"] and data["examples"] == 30 and data["distributed"] == 15
    assert data["coverage"]["cases"] == 30 and data["coverage"]["features"]["wrapper ddp"] > 0
    kept = {(entry["property"], entry["world"]): entry for entry in data["deviations"] if entry["dtype"] == "float64"}
    assert 0 < len(kept["gradients after step one", 2]["ratios"]) <= 15
    assert max(kept["gradients after step one", 2]["ratios"]) < 1e-2, "rounding is far below what is allowed"
    assert data["tolerance"]["float64"] == 1e-9
    json.dumps(data, allow_nan=False)


def test_a_wrong_loss_is_found_shrunk_saved_and_replayed(tmp_path: Path) -> None:
    first, *_ = found_by(plant_loss_of_steps, tmp_path, 2)
    assert (first.kind, first.broken, first.world) == ("wrong result", "losses, norms of later steps", 1)
    case = case_of(first)
    assert (case.steps, case.model.layers, case.accumulation, case.wrapper) == (2, 1, 1, "none")
    file = Path(shlex.split(first.replay)[-1])
    assert json.loads(file.read_text()) == first.record
    again = replay(file, Report(Console(quiet=True)), gloo(plant_loss_of_steps))
    assert [failure.broken for failure in again.failures] == ["losses, norms of later steps"]
    assert not replay(file, Report(Console(quiet=True)), gloo()).failures, "without the fault it holds"


def test_gradients_that_are_a_millionth_off_are_found(tmp_path: Path) -> None:
    first, *_ = found_by(plant_scale_of_tied_gradients, tmp_path, 2)
    assert first.broken == "gradients after step one" and first.world == 1
    case = case_of(first)
    assert case.model.tied and case.model.layers == 2 and case.dtype == "float64"


def test_ranks_that_drift_apart_are_found_on_the_smallest_mesh(tmp_path: Path) -> None:
    # Smaller meshes are tried first. To shrink the rest to its end takes minutes: some attempts are compiled steps.
    first, *_ = found_by(plant_forgotten_rank, tmp_path, 4, profile=replace(SHORT, budget=40))
    assert first.broken == "parameters after the last"
    assert (first.world, case_of(first).data) == (2, 2)


def test_a_rank_that_dies_is_found(tmp_path: Path) -> None:
    first, *_ = found_by(plant_death, tmp_path, 2)
    assert (first.kind, first.broken) == ("rank crash", "every rank answers")
    assert case_of(first).accumulation == 2


def test_a_rank_that_does_not_come_is_found_with_stacks(tmp_path: Path) -> None:
    (first,) = found_by(plant_sleep, tmp_path, 2, timeout=2.0)
    assert first.kind == "rank hang" and "spoiled" in first.message
    assert case_of(first).clipping is not None


def test_steps_that_are_not_compiled_though_they_should_be_are_found_and_replayed(tmp_path: Path) -> None:
    first, *_ = found_by(plant_eager_steps, tmp_path, 2)
    assert (first.kind, first.broken) == ("wrong result", "runs of compiled graphs")
    case = case_of(first)
    assert (case.compiled, case.wrapper, case.checkpointing, case.steps) == ("aot_eager", "none", "none", 1)
    file = Path(shlex.split(first.replay)[-1])
    again = replay(file, Report(Console(quiet=True)), gloo(plant_eager_steps))
    assert [failure.broken for failure in again.failures] == ["runs of compiled graphs"]
    assert not replay(file, Report(Console(quiet=True)), gloo()).failures, "without the fault it holds"


def test_a_record_from_before_steps_were_compiled_is_replayed(tmp_path: Path) -> None:
    file, record = tmp_path / "case.json", small_step(2).to_dict()
    del record["compiled"]
    file.write_text(json.dumps({"training": record}))
    report = replay(file, Report(Console(quiet=True)), gloo())
    assert not report.failures and "runs of compiled graphs" not in report.rows.properties()


def test_a_replay_in_a_simulation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"training": small_step(2).to_dict()}))
    with pytest.raises(Unavailable, match="argument --backend: a training step runs on gloo or nccl, got sim"):
        replay(file, Report(Console(quiet=True)), SimBackend())


def test_a_malformed_record_is_refused(tmp_path: Path) -> None:
    assert saved_training.TRAINING.name == "training steps"
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"training": small_step(2).to_dict() | {"world": 65}}))
    with pytest.raises(Unavailable, match="world is 65; it must be an integer from 1 to 64"):
        replay(file, Report(Console(quiet=True)), GlooBackend())
