"""The report claims what it was told, on the screen as in the JSON; its lines fit a terminal and are copied."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from tests.support.printed import printed, recording, unbroken
from verification.case import Keys
from verification.check.laws import LAWS
from verification.check.properties import PROPERTIES
from verification.failures import RankHang, RankState, VerificationFailure, WrongResult
from verification.report import progress, provenance
from verification.report.counter_example import CounterExample, save_record
from verification.report.coverage import FEATURES, GROUPS, Coverage
from verification.report.report import Report
from verification.report.run_record import DTYPES
from verification.report.summary import LINES
from verification.report.text import command_lines, json_lines
from verification.run.backends import Unavailable
from verification.wording import rate

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


def test_counts_and_worst_ratios_are_those_of_what_was_told() -> None:
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


def test_parts_of_a_run_add_up_and_an_interrupted_one_is_not_taken_for_whole(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("held", "failed", "again", "said"),
    (
        (2, 0, 0, "2 examples, 2 of them distributed, in 0.0 s: all held"),
        (1, 0, 0, "1 example in 0.0 s: it held"),
        (2, 1, 0, "2 examples held, 2 of them distributed, in 0.0 s: 1 counter-example"),
        (0, 2, 12, "no example held in 0.0 s: 2 counter-examples"),
    ),
)
def test_the_verdict_says_what_is_true(held: int, failed: int, again: int, said: str, tmp_path: Path) -> None:
    report = Report(recording())
    report.start_world(2, held)
    for _ in range(held):
        report.held("float32", {"gradients": 0.5}, 0.0)
    fail(report, tmp_path, failed, WRONG)
    for _ in range(again):
        report.failed_again()
    report.end_world()
    assert ("(12 further draws failed in the same way)" in unbroken(printed(report.console))) == (again > 0)
    report.seconds = 0.0
    lines = summary(report)
    assert said in lines
    assert lines[-1].startswith("    " if failed else said), "what failed comes last, as the line that replays it"


def test_the_line_of_a_world_size_counts_what_held_and_what_failed(tmp_path: Path) -> None:
    report = Report(recording())
    report.start_world(3, 2)
    report.held("float32", {"gradients": 0.5}, 0.0)
    fail(report, tmp_path, 1, WRONG)
    report.failed_again()
    report.end_world()
    line = unbroken(printed(report.console)).partition("world 3, examples: ")[2]
    assert line.startswith("1 example held, 2 failed, in ")
    assert line.rstrip().endswith(", 1 counter-example, shrunk to 2 ranks (1 further draw failed in the same way)")


@pytest.mark.parametrize("backend", ("gloo", "sim", "nccl"))
def test_a_failure_is_told_with_its_case_and_the_line_that_replays_it(folder: Path, backend: str) -> None:
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


def test_verbose_has_every_row_and_every_counter_example_and_others_the_smallest(folder: Path) -> None:
    verbose, report = large(verbose=True), large()
    failures = fail(verbose, folder, 3, WRONG)
    lines = summary(verbose)
    assert sum(line.startswith("  world 4 ") for line in lines) == len(TITLES) + len(LAW_NAMES)
    text = unbroken("\n".join(lines))
    assert all(json.dumps(failure.record) in text for failure in failures) and "again - alike: 20" in text
    fail(report, folder, 3, WRONG)
    text = unbroken("\n".join(summary(report)))
    assert [json.dumps(failure.record) in text for failure in failures] == [True, False, False]
    assert text.count("counter-example: ") == 3 and str(WRONG) in text


@pytest.mark.parametrize(("done", "seconds", "said"), ((12, 1.0, "12/s"), (3, 3.0, "1/s"), (2, 7.0, "3.5 s each")))
def test_slow_examples_have_seconds_each(done: int, seconds: float, said: str) -> None:
    assert rate(done, seconds) == said


@pytest.mark.parametrize(
    ("worlds", "reason", "said"),
    (
        ((4, 8), Unavailable("no GPU\nand a traceback"), "worlds 4, 8: not run: no GPU\n"),
        ([4], KeyboardInterrupt(), "world 4: not run: the run was interrupted\n"), ((), "no reason", ""),
    ),
)  # fmt: skip
def test_worlds_left_out_are_named(worlds: Sequence[int], reason: BaseException | str, said: str) -> None:
    report = Report(recording())
    report.not_run(worlds, reason)
    assert printed(report.console) == said


def test_progress_is_shown_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, console = 100.0, recording()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now))
    with progress.RunProgress(console) as part:
        part.begin("world 1024", 600)
        for _ in range(600):
            now += 1.0
            part.advance(0.5)
        part.end()
    said = r"^world 1024: (\d+)/600 examples, 1/s, worst error / bound 0.500$"
    when = [int(number) for number in re.findall(said, printed(console), re.MULTILINE)]
    assert when == [5, 15, 35, 75, 135, 195, 255, 315, 375, 435, 495, 555], "and none for the last one"
    assert len(printed(console).splitlines()) == len(when) and "\x1b" not in printed(console)


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


# Features on paper.
case = partial(plain, tokens=24, heads=4, kv_heads=4, bucket=16, kernel="auto")


def seen(*branches: Branch) -> dict[str, Any]:
    return {"pattern": Pattern(branches)}


def packed(*documents: int, segment: int | None = None, window: int | None = None) -> dict[str, Any]:
    return {"pattern": Pattern((Branch(segment, window=window),), documents=documents)}


def near(*windows: int | None, causal: bool = True, **branch: Any) -> dict[str, Any]:
    """Branches that differ in their windows."""
    return {"pattern": Pattern(tuple(Branch(window=window, **branch) for window in windows), causal)}


SOME = Branch(heads=range(1, 3))
# Feature -> changes to the Case above that make it have the feature; and changes that come close, and do not.
EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "subgroup": ({"world": 3, "group": (0, 2)}, {"world": 3, "group": (0, 1, 2)}),
    "subgroup without rank 0": ({"world": 3, "group": (1, 2)}, {"world": 3, "group": (0, 2)}),
    "empty shard": ({"cuts": (0, 0, 24)}, {"cuts": (0, 1, 24)}),
    "fewer tokens than ranks": ({"tokens": 1}, {"tokens": 2}), "ranks do not divide tokens": ({"tokens": 23}, {}),
    "uneven cuts": ({"cuts": (0, 10, 24)}, {"cuts": (0, 12, 24)}), "one token": ({"tokens": 1}, {}),
    "more than 32 tokens": ({"tokens": 33}, {"tokens": 32}), "dense": ({}, seen(Branch(24))),
    "causal": ({"pattern": Pattern.dense(True)}, {}), "not causal": ({}, {"pattern": Pattern.dense(True)}),
    "segments": (seen(Branch(23)), seen(Branch(24))), "segment on several ranks": (seen(Branch(8)), seen(Branch(12))),
    "w > n": (seen(Branch(25)), seen(Branch(24))), "short tail": (seen(Branch(5)), seen(Branch(8))),
    "offset past a short tail": (seen(Branch(5, 5, 4)), seen(Branch(5, 5, 3))),  # the tail has 4 tokens
    "documents": (packed(24), {}), "no documents": ({}, packed(24)),
    "several documents": (packed(1, 23), packed(0, 24, 0)), "empty document": (packed(0, 24), packed(1, 23)),
    "document of one token": (packed(1, 23), packed(2, 0, 22)),
    "equal documents": (packed(10, 4, 10), packed(1, 0, 0, 1, 22)),
    "document on several ranks": (packed(10, 4, 10), packed(10, 2, 12)),
    "document on three ranks": ({"world": 3} | packed(7, 10, 7), {"world": 3} | packed(7, 9, 8)),
    "document that ends by a shard's end": (packed(11, 13), packed(10, 4, 10)),
    "document after a short tail": (packed(10, 14, segment=8), packed(16, 8, segment=8)), "window": (near(23), {}),
    "no window": ({}, near(None, 23)), "window 0": (near(0), near(1)),
    "window that hides nothing": (near(7, segment_length=8), near(6, segment_length=8)),
    "window that is not causal": (near(22, causal=False), near(23, causal=False)),
    "window with dilation": (near(21, dilation_rate=2), near(22, dilation_rate=2)),  # 0 2 4 .. 22
    "window that ends between steps": (near(4, dilation_rate=3), near(3, dilation_rate=3)),
    "window cut by a segment": (near(1, segment_length=8), near(0, segment_length=8)),
    "window cut by a document": (packed(8, 16, window=1), packed(0, 24, window=1)),
    "window over a shard's end": (near(1), near(1, segment_length=4)),
    "window on three ranks": ({"world": 3} | near(9), {"world": 3} | near(8)),  # the second rank has 8 to 15
    "window in some branches only": (near(None, 3), near(3, 4)),
    "several windows": (near(None, 3, 4), near(None, 3, 3)), "dilation": (seen(Branch(8, 2)), seen(Branch(8, 1))),
    "r > w": (seen(Branch(3, 4)), seen(Branch(4, 4))),
    "r does not divide w": (seen(Branch(8, 3)), seen(Branch(8, 4))),
    "offset": (seen(Branch(8, 2, 1)), seen(Branch(8, 2))),
    "offset past the segment": (seen(Branch(3, 4, 3)), seen(Branch(3, 4, 2))),
    "offsets by head": (seen(Branch(8, 2, (0, 0, 0, 1))), seen(Branch(8, 2, (1, 1, 1, 1)))),
    "one branch": (seen(SOME), seen(SOME, SOME)), "several branches": (seen(SOME, SOME), {}),
    "several branches on a row": (
        seen(Branch(8, 2), Branch(8, 3)), seen(Branch(None, 2), Branch(None, 2, 1), Branch(None, 30, 29, range(0, 1))),
    ),
    "branch for some heads only": (seen(SOME), seen(Branch(heads=range(0, 4)))),
    "head without branch": (seen(SOME), seen(SOME, Branch(heads=range(0, 1)), Branch(heads=range(3, 4)))),
    "branches of other heads read one key": (
        {"kv_heads": 2, **seen(Branch(8, 2, heads=range(0, 1)), Branch(None, 5, heads=range(1, 2)))},
        {"kv_heads": 2, **seen(*(Branch(w, r, 0, range(i, i + 1)) for w, r, i in ((8, 2, 1), (8, 2, 2), (4, 1, 1))))},
    ),
    "dead row": (seen(Branch(8, 2)), seen(Branch(8, 2), Branch(8, 2, 1))),
    "dead key": tuple({"kv_heads": 2, **seen(Branch(8, 2, (0, 1, last, 0)))} for last in (0, 1)),
    "nothing but dead rows": (seen(Branch(2, 3, 2)), seen(Branch(3, 3, 2))), "MHA": ({}, {"heads": 1, "kv_heads": 1}),
    "GQA": ({"kv_heads": 2}, {"kv_heads": 1}), "MQA": ({"kv_heads": 1}, {"kv_heads": 2}),
    "several phases per key/value head": tuple({"kv_heads": 2, **seen(Branch(8, 2, (0, 0, x, 1)))} for x in (0, 1)),
    "several batches": ({"batch": 2}, {}), "head dim 1": ({"head_dim": 1}, {}),
    "values of fewer dims than keys": ({"value_dim": 3}, {"value_dim": 5}),
    "values of more dims than keys": ({"value_dim": 5}, {}),
    "softcap": ({"softcap": 30.0}, {}), "softcap of 1 or less": ({"softcap": 1.0}, {"softcap": 30.0}),
    "sinks": ({"sinks": "large"}, {}), "large sinks": ({"sinks": "large"}, {"sinks": "some"}),
    "sinks of -inf": ({"sinks": "some"}, {"sinks": "normal"}),
    "sinks wider than q": tuple({"sinks": "normal", "dtype": "float16", "seed": seed} for seed in (1, 2)),
    "row that sees a sink alone": ({"sinks": "normal", **seen(Branch(8, 2))}, {"sinks": "normal"}),
    "sinks and softcap": ({"sinks": "normal", "softcap": 1.0}, {"sinks": "normal"}),
    "head dim no power of two": ({"head_dim": 6}, {"head_dim": 1}),
    "head dim >= 32": ({"head_dim": 32}, {"head_dim": 31}), "bucket by default": ({"bucket": None}, {}),
    "bucket of one token": ({"bucket": 1}, {}), "bucket below a shard": ({"bucket": 11}, {"bucket": 12}),
    "bucket beyond a shard": ({"bucket": 13}, {"bucket": 12}),
    "bucket beyond the sequence": ({"bucket": None}, {"bucket": 24}),  # 1024 by default
    "query rows cut": ({"world": 1, "tokens": 17}, {"world": 1, "tokens": 17, "bucket": 17}),
    "explicit scale": ({"scale": 0.5}, {}), "scale <= 0": ({"scale": 0.0}, {}),
    "huge scores": ({"score_scale": 32.0}, {"score_scale": 4.0}), "strided": ({"strided": True}, {}),
    "measured": ({"measured": True}, {}),
    "scores larger than queries": tuple(  # 12 rows times 12 keys, 12 rows of 11
        {"measured": True, "kernel": "math", "bucket": 12, "head_dim": dim} for dim in (11, 12)
    ),
    "descending stretches": tuple(  # 10 to 19, then 0 to 9; and as they were
        {"world": 1, "tokens": 20, "order": "permuted", "seed": seed} for seed in (5, 0)
    ),
    "heads among neighbours": tuple({"world": 4, "exchange": x} for x in ("all-to-all:2+ring", "ring+all-to-all:2")),
    "keys round neighbours": tuple({"world": 4, "exchange": x} for x in ("ring:2+direct", "ring")),
    "keys among neighbours": tuple({"world": 4, "exchange": x} for x in ("ring+all-to-all:2", "all-to-all:2+ring")),
    "fewer keys than queries": ({"keys": Keys(23)}, {"keys": Keys(24)}),
    "more keys than queries": ({"keys": Keys(25)}, {"keys": Keys(24)}),
    "as many keys as queries": ({"keys": Keys(24)}, {}),
    "queries alone on a rank": ({"keys": Keys(1)}, {"keys": Keys(2)}),
    "keys alone on a rank": ({"keys": Keys(2), "cuts": (0, 0, 24)}, {"keys": Keys(1), "cuts": (0, 0, 24)}),
    "causal cross-attention": ({"keys": Keys(9), "pattern": Pattern.dense(True)}, {"pattern": Pattern.dense(True)}),
    "cross-attention with segments": ({"keys": Keys(9)} | seen(Branch(4)), seen(Branch(4))),
    "cross-attention with a window": ({"keys": Keys(9)} | near(4), near(4)),
    "cross-attention with documents": ({"keys": Keys(24)} | packed(10, 14), packed(10, 14)),
}  # fmt: skip


@pytest.mark.parametrize("feature", EXAMPLES)
def test_on_paper(feature: str) -> None:
    has, lacks = ({"world": 2} | changes for changes in EXAMPLES[feature])
    assert FEATURES[feature](case(**has)) and not FEATURES[feature](case(**lacks))


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - set(EXAMPLES)))
def test_choices(feature: str) -> None:
    name, choice = feature.split(" ", 1)
    assert FEATURES[feature](case(2, **{name: choice}))
    assert sum(FEATURES[other](case(2)) for other in GROUPS[name]) == 1


def test_features_are_counted_and_lines_name_what_is_rare_or_missing_or_all() -> None:
    coverage, other = Coverage(), Coverage()
    for batch in (1, 2):
        coverage.add(case(2, batch=batch))
    other.add(case(2, batch=2))
    coverage.add_all(other)
    counts = coverage.to_dict()
    assert (coverage.cases, counts["several batches"], counts["dense"], counts["causal"]) == (3, 2, 3, 0)
    assert list(counts) == list(FEATURES)
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
