"""Faults of every kind are struck into real ranks and named; a wrong naming, and what is left over, is found."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import shared
from tests.support.plain_case import plain
from tests.support.printed import recording
from verification.__main__ import main
from verification.failures import MismatchedMessages, RankCrash, RankError, RankOutcome, RankState, VerificationFailure
from verification.faults import fault_run
from verification.faults.fault_experiment import MishandledFault, check_fault, check_whole, choose_fault, judge
from verification.faults.inject import BY_NAME, KINDS, WORDS_SEPARATOR, Fault, observe_with_fault
from verification.report.report import Report
from verification.run.backends import PRELOAD, GlooBackend, SimBackend, Unavailable
from verification.run.processes import pool
from verification.run.processes.process_tree import descendants

pytestmark = pytest.mark.ranks
CASE = plain(3, tokens=9)


gloo = shared(lambda: GlooBackend(preload=(*PRELOAD, observe_with_fault.__module__)), 3)


def how(kind: str, rank: int = 1, post: int = 0, send: int = 0) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "post": post, "send": send}


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("changes, rank, post", [({"exchange": "direct"}, 2, 3), ({"group": (0, 2)}, 1, 0)])
def test_a_fault_is_named_with_its_rank(gloo: GlooBackend, kind: str, changes: Any, rank: int, post: int) -> None:
    assert check_fault(gloo, replace(CASE, **changes), how(kind, rank, post)) == {BY_NAME[kind].title: 0.0}


def killed(detail: str, outcome: RankOutcome = "raised", rank: int = 1) -> RankCrash:
    """Describe ranks of which one died."""
    states = [RankState(i, "died" if i == rank else outcome, f"raised RuntimeError: {detail}") for i in range(3)]
    return RankCrash(f"rank {rank} was killed", states)


def struck(*said: str) -> RankError:
    """Describe ranks that raised these errors."""
    return RankError("ranks 0, 1, 2 raised", [RankState(i, "raised", f"raised {text}") for i, text in enumerate(said)])


def late(*words: str) -> RankError:
    """Describe ranks that said these words, by index of the group, about a late one."""
    said = WORDS_SEPARATOR.join(f"{index}: {text}" for index, text in enumerate(words))
    return RankError("late", [RankState(i, "raised", f"raised inject.LateRank: {said}") for i in range(3)])


def absent(*ranks: int) -> str:
    names = ", ".join(map(str, ranks))
    return f"RuntimeError: {'rank' if len(ranks) == 1 else 'ranks'} {names} did not come to the forward"


IN_VAIN = "RuntimeError: not all ranks came in time to the forward"
MISSED = "rank 0 must say that it missed index 1 of the group; it raised"


@pytest.mark.parametrize(
    "kind, failure, said",
    [
        ("raise", None, "an exception at post 0 of rank 1 was not found: every rank answered"),
        ("kill", killed("", rank=2), "kill -9 at post 0 of rank 1 must be named with rank 1; it names rank 2"),
        ("kill", killed("the message 'x' from rank 0 did not come"), MISSED),
        ("absent", killed("reset by peer"), MISSED),
        ("kill", killed(f"{absent(1, 2)}: its process has ended"), MISSED),
        ("host", killed(""), "kill -9 of a host at post 0 of rank 1 must be named with ranks 1, 2; it names rank 1"),
        ("interrupt", struck(absent(1), "KeyboardInterrupt: ", absent(1, 2)), "with rank 1; it names ranks 1, 2"),
        ("late", late(absent(1), absent(0, 2), absent(1)), "index 1 of the group must say 'RuntimeError: not all"),
        ("late", late(IN_VAIN, IN_VAIN, IN_VAIN), "nobody named index 1 of the group"),
        ("short", MismatchedMessages("from rank 2 to rank 0"), "a message too short at .* must be named as mismatched"),
        ("long", MismatchedMessages("rank 1 sends "), "a message too long at .* by the simulation, with that rank"),
    ],
)
def test_a_wrong_diagnosis_is_found(kind: str, failure: VerificationFailure | None, said: str) -> None:
    with pytest.raises(MishandledFault, match=said):
        judge(BY_NAME[kind], Fault(kind, 1, 0), CASE, failure)


def test_leftover_ranks_and_processes_are_found(gloo: GlooBackend) -> None:
    ranks, before = set(gloo.prepared().pids), descendants(os.getpid())
    check_whole(gloo, ranks, before, replaced=False)
    pid = min(ranks)
    with pytest.raises(MishandledFault, match=rf"none of \[0, {pid}\] must still be ranks; \[{pid}\] are"):
        check_whole(gloo, {pid, 0}, before, replaced=True)
    with pytest.raises(MishandledFault, match="all of .* must still be ranks"):
        check_whole(gloo, {pid, 0}, before, replaced=False)
    with subprocess.Popen(["sleep", "3600"]) as left:
        with pytest.raises(MishandledFault, match=rf"the processes \[{left.pid}\] were left over"):
            check_whole(gloo, ranks, before, replaced=False)
        left.kill()


@pytest.mark.slow
def test_mishandled_faults_replay_until_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = pool._diagnose
    monkeypatch.setattr(pool, "_diagnose", lambda *arguments: RankCrash("some died", real(*arguments).states[::-1]))
    monkeypatch.setattr(fault_run, "BUDGET", 1.0)
    report = Report(recording())
    fault_run.run_faults(report, (2,), 4, 1, tmp_path)
    assert {failure.kind for failure in report.failures} == {"mishandled fault"}
    monkeypatch.undo()
    assert main(("replay", str(report.failures[0].file))) == 0
    assert "it held" in capsys.readouterr().out


def test_numbers_choose_among_existing_posts() -> None:
    posts = [[1, 0, 2], [0, 0], [1]]  # the rank at index 1 sends nothing
    assert choose_fault(how("kill", 0, 4), posts) == Fault("kill", 0, 1)
    assert choose_fault(how("short", 0, 3, 5), posts) == Fault("short", 0, 2, 1)
    assert choose_fault(how("raise", 3, 7), posts) == Fault("raise", 2, 0)
    with pytest.raises(Unavailable, match="faults need ranks on gloo; got SimBackend"):
        check_fault(SimBackend(), CASE, how("kill"))


def test_the_command_prints_a_row_for_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(("faults", "--count", "5", "--world", "2,3", "--seed", "3", "--json", str(file))) == 0
    text, data = capsys.readouterr().out, json.loads(file.read_text())
    assert all(f"\n{kind.title} " in text and kind.named_as in text for kind in KINDS)
    assert "5 faults in " in text and ": all named, nothing left over" in text
    assert data["examples"] == sum(row["examples"] for row in data["rows"]) == 5 and data["seed"] == 3
    assert {row["world"] for row in data["rows"]} == {2, 3}
