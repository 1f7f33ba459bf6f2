"""World sizes in processes of their own: what they find is what they find one after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.printed import recording
from verification import runner, side_by_side, whole_run
from verification.__main__ import main
from verification.report.report import Report
from verification.run.backends import Unavailable

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]


def small_plan(folder: Path, jobs: int, backend: str = "sim") -> runner.RunPlan:
    return runner.RunPlan((1, 2), runner.PROFILES["quick"], 12, 5, backend, folder, real_size=0, jobs=jobs)


@pytest.mark.slow
def test_the_same_is_drawn_and_found_side_by_side(tmp_path: Path) -> None:
    """In programs of their own: Hypothesis also draws constants of the modules that a program has imported."""
    found = [drawn(tmp_path, jobs) for jobs in ("1", "2")]
    one, several = (json.loads((tmp_path / f"{jobs}.json").read_text()) for jobs in ("1", "2"))
    assert one["held"] and several["held"] and one["examples"] == several["examples"] > 24
    assert one["distributed"] == several["distributed"] and one["coverage"] == several["coverage"]
    for row in (*one["rows"], *several["rows"]):
        row.pop("seconds")
    assert one["rows"] == several["rows"]
    tables = [[line[:40] for line in said if re.match(r".{40} +[0-9]+ ", line)] for said in found]
    assert tables[0][:12] == tables[1][:12], "in the order in which they are checked"
    for said in found:
        for world in (1, 2):
            assert sum(line.startswith(f"world {world}, examples: ") for line in said) == 1, said


def drawn(folder: Path, jobs: str) -> list[str]:
    """What a short run of two world sizes prints; its record is in the folder."""
    words = ["run", "--world", "1,2", "--examples", "12", "--real-size", "0", "--backend", "sim", "--seed", "5"]
    files = ["--jobs", jobs, "--json", str(folder / f"{jobs}.json"), "--failures", str(folder)]
    run = subprocess.run(
        [sys.executable, "-m", "verification", *words, *files], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


def test_a_process_that_cannot_go_on_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, began = Report(recording()), side_by_side._Process.begin

    def killed(plan: runner.RunPlan, report: Report, world: int) -> side_by_side._Process:
        process = began(plan, report, world)
        if world == 2:
            process.process.kill()
        return process

    monkeypatch.setattr(side_by_side._Process, "begin", killed)
    with pytest.raises(Unavailable, match="the process of world 2 ended with exit status -9"):
        whole_run.run(small_plan(tmp_path, 2), report)
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="nccl needs"):
        whole_run.run(small_plan(tmp_path, 2, "nccl"), report)


@pytest.mark.slow
def test_an_interrupt_reports_what_held_until_then(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal at once."""
    words = ["run", "--world", "1,2", "--examples", "100000", "--real-size", "0", "--backend", "sim", "--jobs", "2"]
    heeding = "env", "--default-signal=INT"  # what a shell starts in the background ignores it, and so would this
    run = subprocess.Popen(
        [*heeding, sys.executable, "-m", "verification", *words, "--failures", str(tmp_path)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT,
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
