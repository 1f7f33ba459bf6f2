"""What the report claims is what it was told: counts, worst ratios, failures; on the screen as in the JSON."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.printed import printed, recording, unbroken
from verification.failures import RankHang, RankState, WrongResult
from verification.report.counter_example import save_record
from verification.report.report import Report
from verification.report.row_table import Row


def told() -> Report:
    """Three examples on one rank, two on three ranks, of which one failed."""
    report = Report(recording())
    report.start_world(1, 3)
    for ratio in (0.25, 0.5, 0.125):
        report.held("float32", {"gradients": ratio, "buffers": 0.0}, 1.0)
    report.end_world()
    report.start_world(3, 2)
    report.held("float16", {"gradients": 0.75}, 2.0)
    return report


def said_by(report: Report) -> str:
    report.summary()
    return printed(report.console)


def test_counts_and_worst_ratios_are_those_of_what_held() -> None:
    data = told().to_dict()
    assert (data["examples"], data["distributed"], data["held"]) == (4, 1, True)
    rows = {(row["property"], row["world"], row["dtype"]): row for row in data["rows"]}
    assert set(rows) == {("gradients", 1, "float32"), ("buffers", 1, "float32"), ("gradients", 3, "float16")}
    gradients = rows["gradients", 1, "float32"]
    assert (gradients["examples"], gradients["worst_ratio"], gradients["seconds"]) == (3, 0.5, 3.0)
    assert data["worst_ratio"] == {"float64": None, "float32": 0.5, "bfloat16": None, "float16": 0.75}


def test_the_screen_says_the_same() -> None:
    text = said_by(told())
    lines = {line.split("  ")[0]: line.split()[-6:] for line in text.splitlines()}
    assert lines["gradients"] == ["4", "-", "0.500", "-", "0.750", "5.0"]
    assert lines["buffers"] == ["3", "-", "0", "-", "-", "3.0"]
    assert lines["all"][:-1] == ["4", "-", "0.500", "-", "0.750"]
    assert "worst error / bound on 1, 3 ranks" in text
    assert "4 examples, 1 of them distributed" in text and "all held" in text
    assert "world 1, examples: 3 examples held" in text


def test_a_ratio_that_is_no_number_is_never_lost() -> None:
    row = Row()
    for ratio in (0.5, math.nan, 0.25):
        row.add(ratio, 0.0)
    assert math.isnan(row.worst_ratio) and row.examples == 3
    report = told()
    report.held("float32", {"gradients": math.nan}, 0.0)
    assert report.to_dict()["worst_ratio"]["float32"] is None
    assert said_by(report).count("nan") == 2, "in its row, and in that of all"


@pytest.mark.parametrize("backend", ("gloo", "sim", "nccl"))
def test_a_failure_is_told_with_its_case_and_the_line_that_replays_it(tmp_path: Path, backend: str) -> None:
    report = told()
    record: dict[str, Any] = {"world": 3, "tokens": 5}
    states = [RankState(0, "blocked", "stood at", "here"), RankState(1, "answered", "had answered")]
    failure = RankHang("no answer from rank 0", states)
    report.failed(save_record(failure, "every rank answers", 3, record, tmp_path, backend))
    report.end_world()
    data = report.to_dict()
    assert data["held"] is False and report.fresh == report.failures
    (entry,) = data["failures"]
    assert (entry["kind"], entry["property"], entry["world"]) == ("rank hang", "every rank answers", 3)
    assert (entry["backend"], entry["case"]) == (backend, record)
    line = shlex.split(entry["replay"])
    place = [] if backend == "gloo" else ["--backend", backend]
    assert line[:-1] == [sys.executable, "-m", "verification", "replay", *place]
    assert json.loads(Path(line[-1]).read_text()) == record
    text = said_by(report)
    assert "1 counter-example" in text and json.dumps(record) in unbroken(text)
    shown = shlex.split(unbroken(text).rpartition("replay: ")[2])  # paths beneath the working directory are shortened
    assert [Path(word).absolute() for word in shown] == [Path(word).absolute() for word in line]
    assert "no answer from rank 0" in text and "here" in text, "the stacks are part of it"


@pytest.mark.parametrize(
    ("held", "failed", "said"),
    (
        (2, 0, "2 examples, 2 of them distributed, in 0.0 s: all held"),
        (1, 0, "1 example in 0.0 s: it held"),
        (2, 1, "2 examples held, 2 of them distributed, in 0.0 s: 1 counter-example"),
        (1, 2, "1 example held in 0.0 s: 2 counter-examples"),
        (0, 1, "no example held in 0.0 s: 1 counter-example"),
    ),
)
def test_the_verdict_says_what_is_true(held: int, failed: int, said: str, tmp_path: Path) -> None:
    report = Report(recording())
    report.start_world(2, held)
    for _ in range(held):
        report.held("float32", {"gradients": 0.5}, 0.0)
    for _ in range(failed):
        report.failed(save_record(WrongResult("values: out"), "output and lse", 2, {"world": 2}, tmp_path, "sim"))
    report.end_world()
    report.seconds = 0.0
    lines = said_by(report).splitlines()
    assert said in lines
    assert lines[-1].startswith("    " if failed else said), "what failed comes last, as the line that replays it"


def test_a_world_s_line_counts_what_failed_again(tmp_path: Path) -> None:
    report = told()
    for world, again in ((2, 1), (3, 12), (4, 0)):
        report.start_world(world, 1)
        report.failed(save_record(WrongResult("values: out"), "gradients", world, {"world": world}, tmp_path, "sim"))
        for _ in range(again):
            report.failed_again()
        report.end_world()
    said = re.findall(r"no example held in \S+ s, 1 counter-example( \(.*?\))?", unbroken(printed(report.console)))
    assert said == [" (1 more example failed in the same way)", " (12 more examples failed in the same way)", ""]


def test_failures_of_an_earlier_world_are_not_fresh(tmp_path: Path) -> None:
    report = told()
    report.failed(save_record(WrongResult("values: out"), "output and lse", 3, {"world": 3}, tmp_path, "gloo"))
    report.start_world(4, 1)
    assert report.failures and not report.fresh


def test_an_interrupted_run_is_not_taken_for_a_whole_one() -> None:
    report = told()
    report.start_world(2, 10)
    report.held("float32", {"gradients": 0.5}, 1.0)
    assert report.to_dict()["held"] and "interrupted" not in report.to_dict()
    report.interrupt()
    found = report.to_dict()
    assert found["interrupted"] is True and found["held"] is False and found["examples"] == report.examples
    assert said_by(report).splitlines()[-1].endswith(", then interrupted")
    spent = report.seconds
    report.interrupt()  # between two world sizes nothing is under way
    assert report.seconds == spent > 0


def test_a_case_that_cannot_be_saved_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    failure = save_record(WrongResult("values: out"), "output and lse", 2, {"world": 2}, tmp_path / "file", "gloo")
    assert "the Case could not be saved" in failure.message and failure.record == {"world": 2}
