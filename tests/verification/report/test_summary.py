"""What a run prints at its end stays within 40 lines of 80 columns, whatever was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.plain_case import plain
from tests.support.printed import printed, recording, unbroken
from verification.check.laws import LAWS
from verification.check.properties import PROPERTIES
from verification.failures import RankHang, RankState, VerificationFailure, WrongResult
from verification.report.counter_example import CounterExample, save_record
from verification.report.report import Report
from verification.report.row_table import DTYPES
from verification.report.summary import LINES

TITLES = [one.title for one in PROPERTIES]
LONG = "values: out is 0.62 at batch 0, token 3, head 1, dim 0 (rank 1), expected 0.41: error 0.2 is 1.2e+05 times its "
LONG += "bound 1.2e-07; 4 of 24 entries exceed theirs"
STACK = "\n".join(f'  File "/somewhere/in/a/folder/module_{n}.py", line {n} in function' for n in range(40))
HANG = RankHang("no answer from rank 0", [RankState(0, "blocked", "stood at", STACK), RankState(1, "answered")])

ON_CPUS = [law for law in LAWS if law.on_cpus]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where counter-examples are saved, as a run has it: beneath the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".verification" / "failures"


def report(verbose: bool = False, terminal: bool = False) -> Report:
    """All that a run has in its table, on five world sizes, and more Cases than its coverage has lines for."""
    found = Report(recording(terminal), verbose=verbose)
    for world in (1, 2, 3, 4, 8):
        found.start_world(world, 3)
        for dtype in DTYPES:
            found.held(
                dtype, dict.fromkeys(TITLES, 0.0) | {"output and lse": 0.05 * world, "gradients": 0.1 * world}, 1.0
            )
            found.covered(plain(world, dtype=dtype))
        for law in ON_CPUS:
            found.held("float32", {law.name: 3e-4}, 1.0)
        found.end_world()
    found.notable.append(f"one problem of real size: {'so many words ' * 8}")
    return found


def fail(found: Report, folder: Path, failures: int, failure: VerificationFailure) -> list[CounterExample]:
    for seed in range(failures):
        case = plain(2 + seed, seed=seed)
        record = json.loads(case.to_json())
        found.failed(save_record(failure, "output and lse", case.world, record, folder, "gloo"))
    return found.failures


def summary(found: Report) -> list[str]:
    """The lines that the summary adds."""
    before = len(printed(found.console))
    found.summary()
    return printed(found.console)[before:].splitlines()


@pytest.mark.parametrize("terminal", (False, True))
@pytest.mark.parametrize("failures", (0, 1, 2, 7))
@pytest.mark.parametrize("failure", (WrongResult(LONG), HANG), ids=("wrong", "hang"))
def test_it_stays_within_its_lines_and_columns(
    folder: Path, failures: int, failure: VerificationFailure, terminal: bool
) -> None:
    found = report(terminal=terminal)
    fail(found, folder, failures, failure)
    lines = summary(found)
    assert len(lines) <= LINES < 40 and max(map(len, lines)) <= 80, "\n".join(lines)
    assert any(line.startswith("! output and lse" if failures else "output and lse") for line in lines)
    assert any(line.startswith("gradients") and "0.800" in line for line in lines)


def test_one_row_for_a_property_and_the_worlds_in_the_title() -> None:
    found = report()
    found.notable.clear()  # with these lines there is less room for rows, as with those of the coverage
    found.coverage.cases = 0
    lines = summary(found)
    assert lines[0] == "worst error / bound on 1, 2, 3, 4, 8 ranks (0: exact, -: not drawn)"
    names = [*TITLES, *(law.name for law in ON_CPUS)]
    last = next(number for number, line in enumerate(lines) if line.startswith("all "))
    shown = [line[:40].strip() for line in lines[2:last]]
    counted = 0 if shown[-1] in names else int(shown.pop().split()[1])  # "and 2 more, which --verbose lists"
    assert shown == [name for name in names if name in shown] and len(shown) + counted == len(names)
    assert counted <= 3 and all(law.name in shown for law in ON_CPUS)
    assert lines[-1].endswith(": all held")


def test_where_room_is_short_properties_that_held_exactly_are_counted(folder: Path) -> None:
    found = report()
    fail(found, folder, 1, WrongResult(LONG))
    text = "\n".join(summary(found))
    assert "which --verbose lists" in text and "gradients" in text and "! output and lse" in text
    shown = [title for title in TITLES if title in text]
    assert sum(law.name in text for law in ON_CPUS) >= 12 > len(shown), "errors that are not 0 come first"


def test_the_smallest_counter_example_comes_last_and_can_be_copied(folder: Path) -> None:
    found = report()
    failures = fail(found, folder, 3, WrongResult(LONG))
    lines = summary(found)
    case, replay = (next(n for n, x in enumerate(lines) if x.startswith(head)) for head in ("Case: ", "replay: "))
    assert json.loads("\n".join(lines[case:replay]).removeprefix("Case: ")) == failures[0].record
    said = unbroken("\n".join(lines[replay:])).removeprefix("replay: ")
    assert said == failures[0].replay.replace(f"{folder.parents[1]}/", ""), "the file is named as seen from here"
    assert LONG in unbroken("\n".join(lines))
    others = [line for line in lines if line.startswith("counter-example: ")]
    assert len(others) == 3 and "2 ranks" in others[-1]


def test_stacks_are_printed_once_in_full(folder: Path) -> None:
    found = report()
    fail(found, folder, 1, HANG)
    assert "module_39.py" in printed(found.console), "when it was found"
    assert "module_39.py" not in "\n".join(summary(found))


def test_verbose_has_every_row_and_every_counter_example(folder: Path) -> None:
    found = report(verbose=True)
    failures = fail(found, folder, 3, WrongResult(LONG))
    lines = summary(found)
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  world 4 ") for line in lines) == len(TITLES) + len(ON_CPUS)
    text = unbroken("\n".join(lines))
    assert all(json.dumps(failure.record) in text for failure in failures) and "again - alike: 20" in text


def test_a_replay_ends_with_its_verdict(folder: Path) -> None:
    found = Report(recording())
    found.start_world(2, 1)
    fail(found, folder, 1, WrongResult(LONG))
    found.end_world("replay")
    before = len(printed(found.console))
    found.summary(replayed=True)
    first, *_, last = printed(found.console)[before:].splitlines()
    assert first.startswith('Case: {"world": 2') and last.startswith("no example held in ")
    assert LONG in unbroken(printed(found.console)), "said when it failed"
