"""A run saves what it finds, and a replay finds that again; what cannot be run or replayed is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.plain_case import plain
from tests.support.planted import plant_wrong_result
from verification import runner, whole_run
from verification.case import Case
from verification.replay.replay import replay
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend, Unavailable, open_backend

pytestmark = pytest.mark.ranks

SHORT = runner.Profile("for tests", 100, budget=20)


def small_plan(folder: Path, worlds: tuple[int, ...], examples: int) -> runner.RunPlan:
    return runner.RunPlan(worlds, SHORT, examples, seed=5, backend="gloo", failures=folder)


@pytest.mark.slow
def test_a_run_saves_what_a_replay_finds_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.real_size, "run", lambda *args: None)
    monkeypatch.setattr(runner, "LAWS", ())
    report = whole_run.run(
        small_plan(tmp_path, (2, 3), 60), Report(Console(quiet=True)), GlooBackend(3.0, plant_wrong_result)
    )
    assert {failure.world for failure in report.failures} == {2, 3}, "the run goes on after a failure"
    data = report.to_dict()
    assert data["held"] is False and len(data["failures"]) == len(report.failures)
    for entry in data["failures"]:
        assert entry["backend"] == "gloo"
        file = Path(shlex.split(entry["replay"])[-1])
        assert json.loads(file.read_text()) == entry["case"]
        assert Case.from_json(file.read_text()).pattern.causal
        console = Console(record=True, width=200)
        again = replay(file, Report(console), GlooBackend(3.0, plant_wrong_result))
        assert [failure.kind for failure in again.failures] == ["wrong result"]
        said = console.export_text().splitlines()
        assert said[-1].startswith("no example held in ") and said[-1].endswith(" s: 1 counter-example")
        assert not replay(file, Report(Console(quiet=True)), GlooBackend()).failures, "without the defect it holds"


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="there are GPUs for all these ranks")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(Unavailable, match="nccl needs 8 GPUs for 8 ranks, there are"):
        open_backend("nccl").start(8)


def test_the_profile_quick_draws_enough() -> None:
    plan = runner.RunPlan(runner.WORLDS, runner.PROFILES["quick"], None, 0, "gloo", Path("."))
    drawn = {world: [*runner.plain_on(plan, world), *runner.laws_on(plan, world)] for world in plan.worlds}
    counts = {world: sum(count for _, count in of_world) for world, of_world in drawn.items()}
    assert sum(counts.values()) >= 5000
    assert sum(count for world, count in counts.items() if world > 1) >= 3500
    assert min(counts.values()) >= 100


def test_a_case_of_gpus_is_replayed_where_there_are_none(tmp_path: Path) -> None:
    """On the CPU it has the bounds and the bytes of the CPU, and it is said."""
    case = plain(2, device="cuda", kernel="cudnn", dtype="bfloat16", exchange="direct", head_dim=8)
    (tmp_path / "case.json").write_text(case.to_json())
    console = Console(record=True, width=200)
    report = replay(tmp_path / "case.json", Report(console), SimBackend())
    assert not report.failures and report.examples == 1
    assert "the Case has device 'cuda'; on sim it runs on 'cpu'" in console.export_text()
