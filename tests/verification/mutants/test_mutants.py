"""Seeded defects: the catalogue can be planted, changed code reaches its users, and the search finds what it plants."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.plain_case import plain
from verification.experiments import EXAMPLES
from verification.failures import RankError
from verification.mutants import experiments, search
from verification.mutants.catalogue import DEFECTS, by_name
from verification.mutants.defect import CannotPlant, Defect, Edit
from verification.mutants.plant import preparation, substitute
from verification.run.backends import SimBackend, Unavailable
from verification.search.experiment import FoundFailure, ToolError

BUDGET, ACCUMULATOR = "ring/default_bucket.py", "ring/compute/accumulator.py"


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    """The text to replace stands where the catalogue says, once, and the edited source is another program."""
    assert defect.sources() and by_name(defect.name) is defect, "its name is its own"


def _defect(*edits: tuple[str, ...]) -> Defect:
    return Defect("a-name", "About.", tuple(Edit(*edit) for edit in edits))


@pytest.mark.parametrize(
    "edit, message",
    [
        ((BUDGET, "no such text", ""), "stands 0 times"),
        ((BUDGET, "import", ""), "times, not once"),
        ((BUDGET, "SHARE = 0.1", "SHARE  =  0.1"), "says the same"),
        ((BUDGET, "SHARE = 0.1", "SHARE = ("), "does not compile"),
        ((ACCUMULATOR, "torch", "", "no_function"), "no_function is defined 0 times"),
        ((ACCUMULATOR, "torch.maximum", "", "Accumulator.merge"), "Accumulator.merge of ring/"),
    ],
)
def test_an_edit_without_its_place_is_refused(edit: tuple[str, ...], message: str) -> None:
    with pytest.raises(CannotPlant, match=f"a-name: .*{message}"):
        _defect(edit).sources()


def test_edits_of_one_file_add_up_within_their_functions() -> None:
    edits = [(ACCUMULATOR, "maximum", "minimum", "merge"), (ACCUMULATOR, "torch.log(", "torch.log2(", "merge")]
    (source,) = _defect(*edits).sources().values()
    assert "torch.minimum(" in source and "torch.log2(" in source
    with pytest.raises(ValueError, match=r"sources must be of modules of the project, got ring\.missing"):
        substitute({"ring.missing": ""})


@pytest.mark.ranks
def test_modules_that_fail_to_import_are_refused() -> None:
    with closing(SimBackend(prepare=preparation(_defect((BUDGET, "SHARE = 0.1", "SHARE = 1 / 0"))))) as backend:
        backend.start(1)
        with pytest.raises(
            Unavailable, match=r"a-name: the edited ring\.default_bucket does not run: ZeroDivisionError"
        ):
            EXAMPLES.check(backend, plain(2))


@pytest.mark.ranks
@pytest.mark.slow
def test_defects_of_the_oracle_reach_the_judge() -> None:
    """Ranks and oracle agree then, so only a second statement of the same shows it."""
    defect = by_name("oracle-dlse-of-rows-without-weight")
    assert defect.in_oracle and search.try_defect(defect.name, seed=3, limit=300).killed


def test_defects_with_broken_code_are_no_kill() -> None:
    defect, subject = by_name("merge-by-sigmoid"), experiments.Subject(EXAMPLES, plain(2))
    for error in ("UnboundLocalError: cannot access local variable 'top'", "NameError: name 'top' is not defined"):
        found = FoundFailure(RankError(f"rank 0 raised: {error}"), subject, "sim")
        with pytest.raises(ToolError, match="merge-by-sigmoid: the edited code does not run: rank 0 raised"):
            search.make_outcome(defect, found, 1, 0.1)
    found = FoundFailure(RankError("rank 0 raised: ValueError: shapes"), subject, "sim")
    assert search.make_outcome(defect, found, 1, 0.1).killed


@pytest.mark.ranks
@pytest.mark.slow
def test_ended_searches_leave_no_process() -> None:
    names = ("lse-in-bfloat16", "no-mark-before-the-first-second")
    words = [sys.executable, "-m", "verification", "mutants", "--limit", "1000000", *names]
    search = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    _wait_for(search.pid, range(5, 100))
    search.send_signal(signal.SIGTERM)
    search.wait(timeout=60)
    _wait_for(search.pid, range(1))


def _wait_for(session: int, wanted: range) -> None:
    """Wait until so many processes of that session have not ended."""
    last, running = time.monotonic() + 60.0, -1
    while running not in wanted:
        assert time.monotonic() < last, running
        time.sleep(0.1)
        running = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                state, _, _, its_session, *_ = stat.read_text().rpartition(")")[2].split()
                running += its_session == str(session) and state not in "ZX"
