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

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from verification.__main__ import main
from verification.failures import RankCrash, VerificationFailure
from verification.faults import fault_experiment, fault_run
from verification.faults.fault import BY_NAME, KINDS, Fault, MishandledFault
from verification.faults.fault_experiment import FAULTS, check_fault, check_whole, chosen
from verification.faults.struck import observe_struck
from verification.report.report import Report
from verification.run.backends import PRELOAD, GlooBackend, SimBackend
from verification.run.processes import pool
from verification.search.search import Search

pytestmark = pytest.mark.ranks
CASE = plain(3, tokens=9)


@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooBackend]:
    with closing(GlooBackend(preload=(*PRELOAD, observe_struck.__module__))) as backend:
        backend.start(3)
        yield backend


def how(kind: str, rank: int = 0, post: int = 0, send: int = 0) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "post": post, "send": send}


# --- what is struck is named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize(("rank", "post", "exchange"), ((1, 0, "ring"), (2, 3, "direct")))
def test_a_fault_is_named_with_its_rank(gloo: GlooBackend, kind: str, rank: int, post: int, exchange: str) -> None:
    case = replace(CASE, exchange=exchange)
    assert check_fault(gloo, case, how(kind, rank, post)) == {BY_NAME[kind].title: 0.0}


@pytest.mark.parametrize("kind", ("kill", "short", "long"))
def test_a_rank_of_a_group_is_named_as_in_the_world(gloo: GlooBackend, kind: str) -> None:
    check_fault(gloo, plain(3, group=(0, 2), tokens=9), how(kind, rank=1))


# --- what is mishandled is found --------------------------------------------------------------------------------------


def test_a_wrong_rank_is_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is made to say that the next rank died."""
    real = pool._diagnose

    def diagnose(*arguments: Any) -> Any:
        failure = real(*arguments)
        *others, last = failure.states
        return RankCrash("rank 0 died", [replace(one, rank=n) for n, one in enumerate([last, *others])])

    monkeypatch.setattr(pool, "_diagnose", diagnose)
    with pytest.raises(
        MishandledFault, match="kill -9 at post 0 of rank 1 must be named with that rank; named was rank 2"
    ):
        check_fault(gloo, CASE, how("kill", rank=1))


def test_ranks_that_do_not_say_who_is_absent_are_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is made to hear other words of those that are left."""
    real = pool._diagnose

    def heard(said: str) -> None:
        def diagnose(*arguments: Any) -> Any:
            failure = real(*arguments)
            states = [replace(one, detail=said) if one.outcome == "raised" else one for one in failure.states]
            return RankCrash(failure.headline, states)

        monkeypatch.setattr(pool, "_diagnose", diagnose)

    for said in ("raised RuntimeError: Connection reset by peer", "raised RuntimeError: rank 0 did not come to the x"):
        heard(said)
        with pytest.raises(MishandledFault, match="at question 1 of rank 1: rank [02] must say that index 1 of the"):
            check_fault(gloo, replace(CASE, seed=0), how("absent", rank=1, post=1))


def test_a_wrong_kind_is_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_diagnose", lambda *arguments: RankCrash("rank 1 raised"))
    with pytest.raises(
        MishandledFault, match="an exception at post 0 of rank 1 must be a rank error; found was a rank cr"
    ):
        check_fault(gloo, CASE, how("raise", rank=1))


def test_a_wrong_sender_is_found(gloo: GlooBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fault_experiment.strike_on

    def failure_of(backend: Any, case: Any, fault: Fault) -> VerificationFailure:
        with pytest.raises(VerificationFailure) as caught:
            real(backend, case, replace(fault, index=2))
        return caught.value

    monkeypatch.setattr(fault_experiment, "failure_of", failure_of)
    with pytest.raises(
        MishandledFault, match="a message too short at post 0 of rank 1 must be named as mismatched mess"
    ):
        check_fault(gloo, CASE, how("short", rank=1))


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
    try:
        with pytest.raises(MishandledFault, match=r"the processes \[\d+\] were left over"):
            check_fault(gloo, CASE, how("kill"))
    finally:
        for process in left:
            process.kill()
            process.wait()


def test_ranks_of_which_only_some_were_replaced_are_found(gloo: GlooBackend) -> None:
    pids = sorted(gloo.prepared().pids)
    with pytest.raises(MishandledFault, match=rf"none of \[0, {pids[0]}\] must be ranks still; \[{pids[0]}\] are"):
        check_whole(gloo, {pids[0], 0}, set(), replaced=True)
    with pytest.raises(MishandledFault, match="all of .* must be ranks still"):
        check_whole(gloo, {pids[0], 0}, set(), replaced=False)


@pytest.mark.slow
def test_a_mishandled_fault_is_saved_and_holds_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = pool._diagnose
    monkeypatch.setattr(
        pool, "_diagnose", lambda *arguments: RankCrash("some rank died", real(*arguments).states[::-1])
    )
    monkeypatch.setattr(fault_run, "BUDGET", 1.0)
    report = Report(Console(quiet=True))
    fault_run.run_faults(report, (2,), 4, 1, tmp_path)
    assert {failure.kind for failure in report.failures} == {"mishandled fault"}
    monkeypatch.undo()
    assert main(("replay", str(report.failures[0].file))) == 0
    assert "it held" in capsys.readouterr().out


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_faults(gloo: GlooBackend) -> None:
    def drawn(seed: int) -> list[Any]:
        seen: list[Any] = []

        def check(backend: Any, subject: Any) -> dict[str, float]:
            seen.append(FAULTS.record_of(subject))
            return {"a fault": 0.0}

        Search(replace(FAULTS, check=check), gloo, Report(Console(quiet=True)), 3).explore(30, seed)
        return seen

    first = drawn(1)
    assert first == drawn(1) != drawn(2)
    assert {record["fault"]["kind"] for record in first} == set(BY_NAME)


@seeded(1)
@given(fault_experiment.faults(4))
def test_what_is_drawn_keeps_its_own_premise(subject: Any) -> None:
    fault_experiment.premise(*subject)


def test_the_numbers_choose_among_the_posts_that_there_are() -> None:
    posts = [[1, 0, 2], [0, 0], [1]]  # the rank at index 1 sends nothing
    assert chosen(how("kill", 0, 4), posts) == Fault("kill", 0, 1)
    assert chosen(how("short", 0, 3, 5), posts) == Fault("short", 0, 2, 1)
    assert chosen(how("raise", 3, 7), posts) == Fault("raise", 2, 0)


NO_MESSAGES = plain(2, tokens=4, pattern=Pattern((Branch(segment_length=2),)))


@pytest.mark.parametrize(
    ("record", "said"),
    (
        ({"fault": how("burn"), "case": CASE}, "kind is 'burn'; it must be"),
        ({"fault": how("kill", post=-1), "case": CASE}, "post is -1; it must be"),
        ({"fault": {"kind": "kill"}, "case": CASE}, "how must be an object with the fields kind, rank, post, send"),
        ({"fault": how("kill"), "case": NO_MESSAGES}, "case is one whose ranks send nothing"),
    ),
)
def test_an_edited_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any], said: str
) -> None:
    file = tmp_path / "fault.json"
    file.write_text(json.dumps(record | {"case": json.loads(record["case"].to_json())}))
    assert main(("replay", str(file))) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_simulation_has_no_processes() -> None:
    with pytest.raises(ValueError, match="backend: got sim; allowed is"):
        check_fault(SimBackend(), CASE, how("kill"))


# --- the commands -----------------------------------------------------------------------------------------------------


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


def test_a_case_keeps_its_seed_where_another_order_has_no_messages() -> None:
    """The seed decides how ranks ask each other, and orders the tokens too."""
    pattern = Pattern((Branch(2, 1),), True)
    alone = next(
        case
        for seed in range(1, 4000)
        if fault_experiment.has_messages(
            case := replace(plain(2, tokens=4), order="permuted", pattern=pattern, seed=seed)
        )
        and not fault_experiment.has_messages(replace(case, seed=seed - seed % fault_experiment.CASES_PER_APART))
    )
    assert fault_experiment._asked_by_the_group((alone, how("absent")))[0] == alone
