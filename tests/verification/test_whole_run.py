"""A run in one process or in several, of some checks alone, for hours; and a replay."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.plain_case import plain
from tests.support.planted import plant_wrong_result
from tests.support.printed import printed, recording
from verification import runner, whole_run
from verification.check.properties import PROPERTIES
from verification.failures import WrongResult
from verification.replay.replay import replay
from verification.report.counter_example import save_record
from verification.report.report import Report
from verification.run.backends import SimBackend, Unavailable

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
SHORT = ("run", "--world", "1,2", "--examples", "12", "--real-size", "0", "--backend", "sim")


def small_plan(folder: Path, **changes: Any) -> runner.RunPlan:
    usual = {"worlds": (1, 2), "profile": runner.PROFILES["quick"], "examples": 12, "seed": 5, "backend": "sim"}
    return runner.RunPlan(**{**usual, "failures": folder, "real_size": 0, **changes})


def test_a_case_of_gpus_is_replayed_where_there_are_none(tmp_path: Path) -> None:
    """On the CPU it has the bounds and the bytes of the CPU, and it is said."""
    case = plain(2, device="cuda", kernel="cudnn", dtype="bfloat16", exchange="direct", head_dim=8)
    (tmp_path / "case.json").write_text(case.to_json())
    report = replay(tmp_path / "case.json", Report(recording()), SimBackend())
    assert not report.failures and report.examples == 1
    assert "the Case has device 'cuda'; on sim it runs on 'cpu'" in printed(report.console)


def test_quick_draws_enough_of_every_titled_property(tmp_path: Path) -> None:
    titles = runner.titles()
    assert set(titles) == {one.title for one in PROPERTIES} | {law.name for law in runner.LAWS}
    assert all(re.fullmatch(r"\S.{15,}\.", about) for about in titles.values()), titles
    plan = small_plan(tmp_path, worlds=runner.WORLDS, examples=None, seed=0, backend="gloo")
    drawn = {world: [*runner.plain_on(plan, world), *runner.laws_on(plan, world)] for world in plan.worlds}
    counts = {world: sum(count for _, count in of_world) for world, of_world in drawn.items()}
    assert sum(counts.values()) >= 5000
    assert sum(count for world, count in counts.items() if world > 1) >= 3500
    assert min(counts.values()) >= 100


@pytest.mark.slow
def test_the_same_is_drawn_and_found_side_by_side(tmp_path: Path) -> None:
    """In programs of their own: Hypothesis also draws constants of the modules that a program has imported."""
    records = []
    for jobs in ("1", "2"):
        file = tmp_path / f"{jobs}.json"
        words = [*SHORT, "--seed", "5", "--jobs", jobs, "--json", str(file), "--failures", str(tmp_path)]
        run = subprocess.run([sys.executable, "-m", "verification", *words], capture_output=True, text=True, cwd=ROOT)
        assert run.returncode == 0, run.stdout + run.stderr
        assert all(run.stdout.count(f"world {world}, examples: ") == 1 for world in (1, 2)), run.stdout
        records.append(json.loads(file.read_text()))
        for row in records[-1]["rows"]:
            row.pop("seconds")
    one, several = records
    assert one["held"] and one["examples"] > 24
    for name in ("held", "examples", "distributed", "coverage", "rows"):
        assert one[name] == several[name]


@pytest.mark.slow
def test_broken_processes_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = whole_run._Process.begin

    def killed(plan: runner.RunPlan, report: Report, world: int) -> whole_run._Process:
        process = began(plan, report, world)
        if world == 2:
            process.process.kill()
        return process

    monkeypatch.setattr(whole_run._Process, "begin", killed)
    with pytest.raises(Unavailable, match="the process of world 2 ended with exit status -9"):
        whole_run.run(small_plan(tmp_path, jobs=2), Report(recording()))
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="nccl needs"):
        whole_run.run(small_plan(tmp_path, jobs=2, backend="nccl"), Report(recording()))


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["all", "the first alone", "the first, killed"])
def test_an_interrupt_reports_what_held_until_then(whom: str, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal at once, other signals the one that was started."""
    words = [*SHORT, "--examples", "100000", "--jobs", "2", "--failures", str(tmp_path)]
    heeding = "env", "--default-signal=INT"  # what a shell starts in the background ignores it, and so would this
    run = subprocess.Popen(
        [*heeding, sys.executable, "-m", "verification", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    assert run.stdout is not None
    said, begun = [""], set[str]()
    while len(begun) < 2:  # each world size has a first line of progress
        said.append(run.stdout.readline())
        assert said[-1], said
        begun |= {said[-1].partition(":")[0]} if "examples, " in said[-1] else set()
    if whom == "all":
        os.killpg(run.pid, signal.SIGINT)
    else:
        os.kill(run.pid, signal.SIGINT if whom == "the first alone" else signal.SIGKILL)
    rest = run.communicate(timeout=60)[0]
    assert all(f"world {world}, interrupted: " in rest for world in (1, 2)), rest
    if whom != "the first, killed":
        assert run.returncode == 2 and "all held, then interrupted" in rest, rest
    last = time.monotonic() + 20.0
    with pytest.raises(ProcessLookupError):  # nothing is left of it
        while time.monotonic() < last:
            os.killpg(run.pid, 0)
            time.sleep(0.1)


ALWAYS = "every rank answers"  # is looked at in every plain example


@pytest.mark.parametrize(
    ("only", "rows", "broken"),
    [
        (("bytes sent", "inputs intact, repeatable"), {ALWAYS, "bytes sent", "inputs intact, repeatable"}, []),
        ((ALWAYS,), {ALWAYS}, []),
        (("later tokens change nothing",), {"later tokens change nothing"}, []),
        (("output and lse", "buffers"), None, ["output and lse"]),
    ],
)
def test_only_what_is_named_judges(
    only: tuple[str, ...], rows: set[str] | None, broken: list[str], tmp_path: Path
) -> None:
    """Outputs are wrong, by the same factor on any ranks."""
    backend = SimBackend(10.0, plant_wrong_result)
    plan = small_plan(tmp_path, worlds=(2,), examples=30, only=only)
    report = whole_run.run(plan, Report(recording()), backend, backend)
    assert [failure.broken for failure in report.failures] == broken
    if rows is not None:
        assert {name for name in report.rows.properties() if report.rows.total(name).examples == 30} == rows


def test_repeated_runs_draw_new_seeds_until_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def run_world(plan: runner.RunPlan, report: Report, backend: Any, shrink_backend: Any, world: int) -> None:
        seeds.append(plan.seed)
        report.start_world(world, 1)
        report.held("float32", {"gradients": 0.25}, 0.5)
        if len(seeds) == 3:
            report.failed(save_record(WrongResult("values: out"), "gradients", 2, {"world": 2}, tmp_path, "sim"))
        report.end_world()

    monkeypatch.setattr(whole_run, "run_world", run_world)
    report, plan = Report(recording(), {"seed": 5}), small_plan(tmp_path, worlds=(2,))
    whole_run.run(plan, report, hours=1.0)
    assert seeds == [5, 6, 7] and report.examples == 3 and len(report.failures) == 1
    assert report.to_dict()["seed"] == 7 and "repeat this run with --seed 7" in printed(report.console)
    whole_run.run(plan, Report(recording()), hours=1e-9)
    assert seeds[3:] == [5], "what is under way when time is over is finished, and nothing is begun"
