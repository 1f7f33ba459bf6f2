"""World sizes in processes of their own: what they find is what they find one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.printed import printed, recording
from verification import runner, side_by_side, whole_run
from verification.__main__ import main
from verification.report.report import Report
from verification.run.backends import Unavailable

pytestmark = pytest.mark.ranks


def small_plan(folder: Path, jobs: int, backend: str = "sim") -> runner.RunPlan:
    return runner.RunPlan((1, 2), runner.PROFILES["quick"], 12, 5, backend, folder, real_size=0, jobs=jobs)


@pytest.mark.slow
def test_the_same_is_drawn_and_found_side_by_side(tmp_path: Path) -> None:
    console = recording()
    one, several = (whole_run.run(small_plan(tmp_path, jobs), Report(console)) for jobs in (1, 2))
    assert not one.failures and not several.failures
    assert one.examples == several.examples > 24 and one.distributed == several.distributed
    assert one.coverage.to_dict() == several.coverage.to_dict() and one.coverage.cases == several.coverage.cases
    assert one.rows.properties()[:12] == several.rows.properties()[:12], "in the order in which they are checked"
    worst = [
        {key: (row.examples, row.worst_ratio) for key, row in report.rows.by_key.items()} for report in (one, several)
    ]
    assert worst[0] == worst[1]
    said = printed(console).splitlines()
    for world in (1, 2):
        assert sum(line.startswith(f"world {world}, examples: ") for line in said) == 2, said


def test_a_process_that_cannot_go_on_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, began = Report(recording()), side_by_side._World.begin

    def killed(plan: runner.RunPlan, report: Report, size: int) -> side_by_side._World:
        world = began(plan, report, size)
        if size == 2:
            world.process.kill()
        return world

    monkeypatch.setattr(side_by_side._World, "begin", killed)
    with pytest.raises(Unavailable, match="the process of world 2 ended with exit status -9"):
        whole_run.run(small_plan(tmp_path, 2), report)
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="nccl needs"):
        whole_run.run(small_plan(tmp_path, 2, "nccl"), report)


@pytest.mark.slow
def test_an_interrupt_reports_what_held_until_then(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal at once."""
    words = ["run", "--world", "1,2", "--examples", "100000", "--real-size", "0", "--backend", "sim", "--jobs", "2"]
    run = subprocess.Popen(
        [sys.executable, "-m", "verification", *words, "--failures", str(tmp_path)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.stdout is not None
    said: list[str] = []
    while not (said and "examples, " in said[-1]):  # the first line of progress
        said.append(run.stdout.readline())
        assert said[-1], said
    os.killpg(run.pid, signal.SIGINT)
    rest = run.communicate(timeout=60)[0]
    assert run.returncode == 2, rest
    for world in (1, 2):
        assert f"world {world}, interrupted: " in rest, rest
    assert "all held, then interrupted" in rest
    last = time.monotonic() + 20.0
    with pytest.raises(ProcessLookupError):  # nothing is left of it
        while time.monotonic() < last:
            os.killpg(run.pid, 0)
            time.sleep(0.1)


def test_world_sizes_that_share_gpus_come_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("run", "--backend", "nccl", "--world", "1,2", "--jobs", "2")) == 2
    assert "argument --jobs: on nccl one world size at a time" in capsys.readouterr().err
    assert main(("run", "--profile", "nightly", "--jobs", "2")) == 2
    assert "argument --jobs: rounds of --profile nightly have their own, got 2" in capsys.readouterr().err
