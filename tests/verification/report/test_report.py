"""The report claims what it was told, on the screen as in the JSON; its lines fit a terminal and are copied."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reference.pattern import Branch, Pattern
from reference.slices import Slice
from tests.support.plain_case import plain
from tests.support.printed import printed, recording, unbroken
from verification.check.laws import LAWS
from verification.check.properties import PROPERTIES
from verification.console import RED, Console, styled
from verification.failures import RankHang, RankState, VerificationFailure, WrongResult
from verification.report import progress, provenance
from verification.report.counter_example import CounterExample, save_record
from verification.report.coverage import FEATURES, GROUPS, Coverage
from verification.report.report import Report
from verification.report.run_record import DTYPES
from verification.report.summary import LINES
from verification.report.text import command_lines, json_lines

TITLES = [one.title for one in PROPERTIES]
LAW_NAMES = [law.name for law in LAWS if law.on_cpus]
WRONG = WrongResult(
    "values: out is 0.62 at batch 0, token 3, head 1, dim 0 (rank 1), expected 0.41: error 0.2 is 1.2e+05 times its "
    "bound 1.2e-07; 4 of 24 entries exceed theirs"
)
STACK = "\n".join(f'  File "/somewhere/in/a/folder/module_{n}.py", line {n} in function' for n in range(40))
HANG = RankHang("no answer from rank 0", [RankState(0, "blocked", "stood at", STACK), RankState(1, "answered")])


def small() -> Report:
    """Three examples on one rank, and one on three, where another is under way."""
    report = Report(recording())
    report.start_world(1, 3)
    for ratio in (0.25, 0.5, 0.125):
        report.held("float32", {"gradients": ratio, "buffers": 0.0}, 1.0)
    report.end_world()
    report.start_world(3, 2)
    report.held("float16", {"gradients": 0.75}, 2.0)
    return report


def large(verbose: bool = False, terminal: bool = False) -> Report:
    """All that a run has in its table, on five world sizes."""
    report = Report(recording(terminal), verbose=verbose)
    for world in (1, 2, 3, 4, 8):
        report.start_world(world, 3)
        for dtype in DTYPES:
            errors = {"output and lse": 0.05 * world, "gradients": 0.1 * world}
            report.held(dtype, dict.fromkeys(TITLES, 0.0) | errors, 1.0)
            report.covered(plain(world, dtype=dtype))
        for name in LAW_NAMES:
            report.held("float32", {name: 3e-4}, 1.0)
        report.end_world()
    report.notable.append(f"one problem of real size: {'so many words ' * 8}")
    return report


def fail(report: Report, folder: Path, failures: int, failure: VerificationFailure) -> list[CounterExample]:
    for seed in range(failures):
        case = plain(2 + seed, seed=seed)
        record = json.loads(case.to_json())
        report.failed(save_record(failure, "output and lse", case.world, record, folder, "gloo"))
    return report.failures


def summary(report: Report, replayed: bool = False) -> list[str]:
    """The lines that the summary adds."""
    before = len(printed(report.console))
    report.summary(replayed)
    return printed(report.console)[before:].splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of saved counter-examples, as in a run: beneath the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".verification" / "failures"


def test_counts_and_worst_ratios_are_summed() -> None:
    report = small()
    data, lines = report.to_dict(), summary(report)
    assert (data["examples"], data["distributed"], data["held"]) == (4, 1, True)
    rows = {(row["property"], row["world"], row["dtype"]): row for row in data["rows"]}
    assert set(rows) == {("gradients", 1, "float32"), ("buffers", 1, "float32"), ("gradients", 3, "float16")}
    row = rows["gradients", 1, "float32"]
    assert (row["examples"], row["worst_ratio"], row["seconds"]) == (3, 0.5, 3.0)
    assert data["worst_ratio"] == {"float64": None, "float32": 0.5, "bfloat16": None, "float16": 0.75}
    shown = {line.split("  ")[0]: line.split()[-6:] for line in lines}
    assert shown["gradients"] == ["4", "-", "0.500", "-", "0.750", "5.0"]
    assert shown["buffers"] == ["3", "-", "0", "-", "-", "3.0"]
    assert shown["all"][:-1] == ["4", "-", "0.500", "-", "0.750"]
    for ratio in (math.nan, 0.25):  # what is no number is never lost
        report.held("float32", {"gradients": ratio}, 0.0)
    assert report.to_dict()["worst_ratio"]["float32"] is None
    assert "\n".join(summary(report)).count("nan") == 2, "in its row, and in that of all"


def test_parts_of_runs_add_up(tmp_path: Path) -> None:
    whole, part = small(), small()
    fail(part, tmp_path, 2, WRONG)
    fail(whole, tmp_path, 1, WRONG)
    part.covered(plain(3))
    whole.add(part)
    data = whole.to_dict()
    assert (data["examples"], data["distributed"], data["coverage"]["cases"]) == (8, 2, 1)
    assert {row["examples"] for row in data["rows"]} == {6, 2} and len(data["failures"]) == 2
    report = small()
    assert report.to_dict()["held"] and "interrupted" not in report.to_dict()
    report.interrupt()
    data, spent = report.to_dict(), report.seconds
    assert data["interrupted"] is True and data["held"] is False and data["examples"] == 4
    report.interrupt()  # between two world sizes nothing is under way
    assert report.seconds == spent > 0 and summary(report)[-1].endswith(", then interrupted")


@pytest.mark.parametrize("backend", ("gloo", "sim", "nccl"))
def test_failures_print_their_case_and_replay(folder: Path, backend: str) -> None:
    report, record = small(), dict[str, Any](world=3, tokens=5)
    report.failed(save_record(HANG, "every rank answers", 3, record, folder, backend))
    data = report.to_dict()
    (entry,) = data["failures"]
    assert data["held"] is False and (entry["backend"], entry["case"]) == (backend, record)
    assert (entry["kind"], entry["property"], entry["world"]) == ("rank hang", "every rank answers", 3)
    line = shlex.split(entry["replay"])
    place = [] if backend == "gloo" else ["--backend", backend]
    assert line[:-1] == [sys.executable, "-m", "verification", "replay", *place]
    assert json.loads(Path(line[-1]).read_text()) == record
    text = unbroken("\n".join(summary(report)))
    assert "no answer from rank 0" in text and json.dumps(record) in text
    shown = shlex.split(text.rpartition("replay: ")[2])
    assert shown[:-1] == line[:-1] and not Path(shown[-1]).is_absolute() and Path(shown[-1]).resolve() == Path(line[-1])
    assert "module_39.py" in printed(report.console), "stacks are printed in full when it was found"
    assert "module_39.py" not in text
    unsaved = save_record(WRONG, "output and lse", 2, {"world": 2}, Path(line[-1]), backend)
    assert "the Case could not be saved" in unsaved.message and unsaved.record == {"world": 2}


@pytest.mark.parametrize("terminal", (False, True))
@pytest.mark.parametrize("failures", (0, 1, 7))
@pytest.mark.parametrize("failure", (WRONG, HANG), ids=("wrong", "hang"))
def test_the_summary_stays_within_its_lines_and_columns(
    folder: Path, failures: int, failure: VerificationFailure, terminal: bool
) -> None:
    report = large(terminal=terminal)
    fail(report, folder, failures, failure)
    lines = summary(report)
    assert len(lines) <= LINES < 40 and max(map(len, lines)) <= 80, "\n".join(lines)
    assert any(line.startswith("! output and lse" if failures else "output and lse") for line in lines)
    last = next(number for number, line in enumerate(lines) if line.startswith("all "))
    shown = [line[:40].strip().removeprefix("! ") for line in lines[2:last]]
    assert "gradients" in shown and (set(LAW_NAMES) <= set(shown) or not {"buffers"} & set(shown)), "exact ones last"


def test_progress_is_shown_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, console = 100.0, recording()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now))
    part = progress.RunProgress(console)
    part.begin("world 1024", 600)
    for _ in range(600):
        now += 1.0
        part.advance(0.5)
    part.end()
    said = r"^world 1024: (\d+)/600 examples, 1/s, worst error / bound 0.500$"
    when = [int(number) for number in re.findall(said, printed(console), re.MULTILINE)]
    assert when == [5, 15, 35, 75, 135, 195, 255, 315, 375, 435, 495, 555], "and none for the last one"
    assert len(printed(console).splitlines()) == len(when) and "\x1b" not in printed(console)


def test_progress_is_replaced_and_styles_stay_on_terminals() -> None:
    terminal, file = Console(io.StringIO(), terminal=True, colours=True), Console(io.StringIO())
    for console in (terminal, file):
        part = progress.RunProgress(console)
        part.begin("world 2", 3)
        console.print(f"2 {styled('failed', RED)}")
        part.end()
    assert printed(terminal) == "world 2: 3 examples\r\x1b[2K2 \x1b[1;31mfailed\x1b[0m\n"
    assert printed(file) == "2 failed\n"


def test_broken_lines_are_the_same_in_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = {"law": "a title of several words " * 2, "how": {"mistakes": [["wrong", None]] * 9, "quote": 'a "b" d'}}
    lines = json_lines("Case: ", record)
    assert max(map(len, lines)) <= 80 and len(lines) > 3
    assert json.loads("\n".join(lines).removeprefix("Case: ")) == record
    monkeypatch.chdir(tmp_path)
    words = ["/usr/bin/python", *(f"--option-{n}" for n in range(20)), str(tmp_path / "folder" / "a b.json")]
    lines = command_lines("replay: ", words)
    assert max(map(len, lines)) <= 80 and all(line.endswith(" \\") for line in lines[:-1]) and len(lines) > 3
    copied = "\n".join(lines).removeprefix("replay: ").replace("\\\n", "")
    assert shlex.split(copied) == [*words[:-1], "folder/a b.json"], "files beneath the working directory are shortened"


def test_a_record_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        return subprocess.check_output(("git", "-C", str(tmp_path), *who, *words), text=True).strip()

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() is None
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "nothing")
    head = git("rev-parse", "HEAD")
    assert provenance.commit() == head and len(head) == 40
    (tmp_path / "more").write_text("more")
    assert provenance.commit() == head + "+"


case = partial(plain, tokens=24, heads=4, kv_heads=4, bucket=16, kernel="auto")


def packed(*documents: int, **branch: Any) -> dict[str, Any]:
    return {"pattern": Pattern((Branch(**branch),), True, documents)}


def near(window: int, **branch: Any) -> dict[str, Any]:
    return {"pattern": Pattern((Branch(window=window, **branch),), True)}


def sliced(*slices: tuple[int | None, ...]) -> dict[str, Any]:
    return {"pattern": Pattern((Branch(slices=tuple(map(Slice._make, slices))),))}


# Features that are computed from masks and shards -> changes to the Case above that have the feature, and that come
# close.
EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "document that ends by a shard's end": (packed(11, 13), packed(10, 4, 10)),
    "document after a short tail": (packed(10, 14, segment_length=8), packed(16, 8, segment_length=8)),
    "window that hides nothing": (near(7, segment_length=8), near(6, segment_length=8)),
    "window cut by a segment": (near(1, segment_length=8), near(0, segment_length=8)),
    "window cut by a document": (packed(8, 16, window=1), packed(0, 24, window=1)),
    "window over a shard's end": (near(1), near(1, segment_length=4)),
    "branches of other heads read one key": tuple(
        {"kv_heads": 2, "pattern": Pattern(tuple(Branch(w, r, 0, range(i, i + 1)) for w, r, i in parts))}
        for parts in (((8, 2, 0), (None, 5, 1)), ((8, 2, 1), (8, 2, 2), (4, 1, 1)))
    ),
    "band away from the diagonal": (sliced((0, 24, 0, 24, 1, 9)), sliced((0, 24, 0, 24, 0, 9))),
    "slice that ends with a shard": (sliced((0, 12, 0, 5, None, 0)), sliced((0, 11, 0, 5, None, 0))),
    "slice that ends beside a shard's end": (sliced((0, 11, 0, 5, None, 0)), sliced((0, 12, 0, 5, None, 0))),
    "slice on two shards": (sliced((11, 13, 0, 5, None, None)), sliced((12, 24, 0, 5, None, None))),
    "two intervals of keys": (
        sliced(
            (0, 24, 0, 2, None, -6),
            (0, 24, 0, 24, -5, 0),
        ),
        sliced((0, 24, 0, 2, None, -6), (0, 7, 0, 24, -5, 0)),
    ),
    "slices of later keys": (sliced((0, 24, 0, 24, 1, 9)), sliced((0, 24, 0, 24, -9, 0))),
    "slice on three shards": tuple({"world": 3} | sliced((a, 17, 0, 5, None, None)) for a in (7, 8)),
    "slice longer than a shard": (sliced((0, 13, 0, 5, None, None)), sliced((0, 12, 0, 5, None, None))),
    "no pair in slices": (sliced(), sliced((0, 1, 0, 1, None, None))),
    "slices with a window": tuple(
        {"pattern": Pattern((Branch(window=window, slices=(Slice(high=0),)),))} for window in (22, 23)
    ),
    "two bands in a listed layout": tuple(
        {"order": order} | sliced((0, 24, 0, 24, -9, -6), (0, 24, 0, 24, -3, 0)) for order in ("hilbert", "zigzag")
    ),
    "heads with different slices": tuple(
        {"pattern": Pattern(tuple(Branch(heads=range(i, i + 2), slices=(Slice(high=i * x),)) for i in (0, 2)))}
        for x in (1, 0)
    ),
    "rank whose rows see no key of slices": (sliced((12, 24, 0, 24, None, 0)), sliced((11, 24, 0, 24, None, 0))),
    "dead key": tuple({"kv_heads": 2, "pattern": Pattern((Branch(8, 2, (0, 1, x, 0)),))} for x in (0, 1)),
    "query rows cut": ({"world": 1, "tokens": 17}, {"world": 1, "tokens": 17, "bucket": 17}),
    "scores larger than queries": tuple(  # 12 rows times 12 keys, 12 rows of 11
        {"measured": True, "kernel": "math", "bucket": 12, "head_dim": dim} for dim in (11, 12)
    ),
}


@pytest.mark.parametrize("feature", EXAMPLES)
def test_on_paper(feature: str) -> None:
    has, lacks = ({"world": 2} | changes for changes in EXAMPLES[feature])
    assert FEATURES[feature](case(**has)) and not FEATURES[feature](case(**lacks))


def test_features_are_counted_and_rare_ones_named() -> None:
    coverage, other = Coverage(), Coverage()
    for batch in (1, 2):
        coverage.add(case(2, batch=batch))
    other.add(case(2, batch=2))
    coverage.add_all(other)
    counts = coverage.to_dict()
    assert (coverage.cases, counts["several batches"], counts["dense"], counts["causal"]) == (3, 2, 3, 0)
    assert list(counts) == list(FEATURES)
    said = coverage.extent()
    assert said.startswith("largest drawn: ranks 2, tokens 24, batch 2, heads 4, ") and "; none had causal, doc" in said
    assert "; not looked at memory, " in said and any("tokens 24" in line for line in coverage.rarest())
    coverage = Coverage(1000, dict.fromkeys(FEATURES, 500))
    first = f"coverage: 1000 Cases had {len(FEATURES)} of {len(FEATURES)} features"
    assert coverage.rarest() == [first]
    coverage.counts |= {"one token": 0, "measured": 19, "strided": 3, "dense": 20}
    first = first.replace(f"had {len(FEATURES)}", f"had {len(FEATURES) - 1}")
    assert coverage.rarest() == [first, "  none had: one token", "  few had: strided (3), measured (19)"]
    coverage.counts = dict.fromkeys(FEATURES, 0)
    first, *names = coverage.rarest()
    assert len(names) == 2 and re.search(r"and \d+ more$", names[-1]) and max(map(len, names)) <= 80
    coverage.counts = {name: number for number, name in enumerate(FEATURES)}
    text = unbroken("\n".join(coverage.lines()))
    for group, features in GROUPS.items():
        assert f"{group} - " in text
        assert all(f" {name.removeprefix(f'{group} ')}: {coverage.counts[name]}" in text for name in features)
