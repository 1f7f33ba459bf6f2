"""Faults of every kind are struck into real ranks and named; a wrong naming, and what is left over, is found."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import seed as seeded
from rich.console import Console

from tests.support.plain_case import plain
from verification.__main__ import main
from verification.case import Case
from verification.failures import RankCrash, VerificationFailure
from verification.faults import fault_experiment, fault_run
from verification.faults.fault_experiment import MishandledFault, check_fault, check_whole, chosen
from verification.faults.struck import BY_NAME, KINDS, Fault, observe_struck
from verification.report.report import Report
from verification.run.backends import PRELOAD, GlooBackend, SimBackend
from verification.run.processes import pool

pytestmark = pytest.mark.ranks
CASE = plain(3, tokens=9)
ASKED = replace(CASE, seed=0)  # by the group, not in the memory of the machine


@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooBackend]:
    with closing(GlooBackend(preload=(*PRELOAD, observe_struck.__module__))) as backend:
        backend.start(3)
        yield backend


def how(kind: str, rank: int = 1, post: int = 0, send: int = 0) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "post": post, "send": send}


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("changes, rank, post", [({"exchange": "direct"}, 2, 3), ({"group": (0, 2)}, 1, 0)])
def test_a_fault_is_named_with_its_rank(gloo: GlooBackend, kind: str, changes: Any, rank: int, post: int) -> None:
    assert check_fault(gloo, replace(CASE, **changes), how(kind, rank, post)) == {BY_NAME[kind].title: 0.0}


# --- what is mishandled is found --------------------------------------------------------------------------------------


def of_the_next_rank(failure: RankCrash) -> RankCrash:
    *others, last = failure.states
    return RankCrash("rank 0 died", [replace(one, rank=n) for n, one in enumerate([last, *others])])


def saying(said: str) -> Any:
    def diagnose(failure: RankCrash) -> RankCrash:
        states = [
            replace(x, detail=f"raised RuntimeError: {said}") if x.outcome == "raised" else x for x in failure.states
        ]
        return RankCrash(failure.headline, states)

    return diagnose


MISSED = "rank [02] must say that it missed index 1"


@pytest.mark.parametrize(
    "kind, case, diagnose, found",
    [
        ("kill", CASE, of_the_next_rank, "kill -9 at post 0 of rank 1 must be named with that rank; named was rank 2"),
        (
            "raise",
            CASE,
            lambda failure: RankCrash("it"),
            "an exception at .* must be a rank error; found was a rank cr",
        ),
        ("absent", ASKED, saying("reset by peer"), MISSED),
        ("absent", ASKED, saying("rank 0 did not come to the x"), MISSED),
        ("kill", CASE, saying("the message 'x' from rank 0 did not come"), MISSED),
    ],
)
def test_a_wrong_diagnosis_is_found(
    gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch, kind: str, case: Case, diagnose: Any, found: str
) -> None:
    real = pool._diagnose
    monkeypatch.setattr(pool, "_diagnose", lambda *arguments: diagnose(real(*arguments)))
    with pytest.raises(MishandledFault, match=found):
        check_fault(gloo, case, how(kind))


def test_a_wrong_sender_is_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def failure_of(backend: Any, case: Any, fault: Fault) -> VerificationFailure:
        with pytest.raises(VerificationFailure) as caught:
            fault_experiment.strike_on(backend, case, replace(fault, index=2))
        return caught.value

    monkeypatch.setattr(fault_experiment, "failure_of", failure_of)
    with pytest.raises(MishandledFault, match="a message too short at post 0 of rank 1 must be named as mismatched"):
        check_fault(gloo, CASE, how("short"))


def test_a_fault_that_does_not_show_is_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_experiment, "chosen", lambda how, posts: Fault("raise", 0, 10**6))
    with pytest.raises(MishandledFault, match="was not found: every rank answered"):
        check_fault(gloo, CASE, how("raise"))


def test_a_process_that_is_left_over_is_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = fault_experiment.failure_of, list[subprocess.Popen[bytes]]()

    def failure_of(*arguments: Any) -> VerificationFailure | None:
        left.append(subprocess.Popen(["sleep", "3600"]))
        return real(*arguments)

    monkeypatch.setattr(fault_experiment, "failure_of", failure_of)
    with pytest.raises(MishandledFault, match=r"the processes \[\d+\] were left over"):
        check_fault(gloo, CASE, how("kill"))
    left[0].kill()
    left[0].wait()


def test_ranks_of_which_only_some_were_replaced_are_found(gloo: GlooBackend) -> None:
    pid = min(gloo.prepared().pids)
    with pytest.raises(MishandledFault, match=rf"none of \[0, {pid}\] must be ranks still; \[{pid}\] are"):
        check_whole(gloo, {pid, 0}, set(), replaced=True)
    with pytest.raises(MishandledFault, match="all of .* must be ranks still"):
        check_whole(gloo, {pid, 0}, set(), replaced=False)


@pytest.mark.slow
def test_a_mishandled_fault_is_saved_and_holds_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = pool._diagnose
    monkeypatch.setattr(pool, "_diagnose", lambda *arguments: RankCrash("some died", real(*arguments).states[::-1]))
    monkeypatch.setattr(fault_run, "BUDGET", 1.0)
    report = Report(Console(quiet=True))
    fault_run.run_faults(report, (2,), 4, 1, tmp_path)
    assert {failure.kind for failure in report.failures} == {"mishandled fault"}
    monkeypatch.undo()
    assert main(("replay", str(report.failures[0].file))) == 0
    assert "it held" in capsys.readouterr().out


# --- what is drawn ----------------------------------------------------------------------------------------------------


@seeded(1)
@given(fault_experiment.faults(4))
def test_what_is_drawn_keeps_its_own_premise(subject: Any) -> None:
    fault_experiment.premise(*subject)


def test_the_numbers_choose_among_the_posts_that_there_are() -> None:
    posts = [[1, 0, 2], [0, 0], [1]]  # the rank at index 1 sends nothing
    assert chosen(how("kill", 0, 4), posts) == Fault("kill", 0, 1)
    assert chosen(how("short", 0, 3, 5), posts) == Fault("short", 0, 2, 1)
    assert chosen(how("raise", 3, 7), posts) == Fault("raise", 2, 0)


def test_a_simulation_has_no_processes() -> None:
    with pytest.raises(ValueError, match="backend: got sim; allowed is"):
        check_fault(SimBackend(), CASE, how("kill"))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_for_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(("faults", "--count", "5", "--world", "2,3", "--seed", "3", "--json", str(file))) == 0
    text, data = capsys.readouterr().out, json.loads(file.read_text())
    assert all(f"\n{kind.title} " in text and kind.named_as in text for kind in KINDS)
    assert "5 faults in " in text and ": all named, nothing left over" in text
    assert data["examples"] == sum(row["examples"] for row in data["rows"]) == 5 and data["seed"] == 3
    assert {row["world"] for row in data["rows"]} == {2, 3}


@pytest.mark.parametrize("world", ("1,2", "2,9"))
def test_a_world_without_peers_or_of_too_many_is_refused(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("faults", "--world", world)) == 2
    assert f"argument --world: world sizes must be from 2 to 8, got {world}" in capsys.readouterr().err
