"""Seeded defects: the catalogue can be planted, changed code reaches its users, and the search finds what it plants."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reference.pattern import Pattern
from tests.support.plain_case import plain
from tests.support.printed import printed, recording, unbroken
from verification.case import Case
from verification.cli import mutants as command
from verification.failures import RankError
from verification.mutants import subjects, trials
from verification.mutants.catalogue import DEFECTS, NO_PLACE, by_name
from verification.mutants.defect import CannotPlant, Defect, Edit
from verification.mutants.plant import preparation, substitute
from verification.run.backends import PRELOAD, SimBackend, Unavailable
from verification.run.processes.pool import Pool
from verification.runner import EXAMPLES
from verification.search.experiment import Found, ToolError

ROOT = Path(__file__).parents[3]
LISTED = range(1, 43)  # the project's list of defect classes seen in public ring-attention code
BUDGET = "ring/budget.py"


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_the_catalogue_is_short_and_each_defect_has_its_source() -> None:
    assert len(DEFECTS) <= 200 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    public = [defect for defect in DEFECTS if defect.provenance != "own"]
    assert len(public) >= 3 / 4 * len(DEFECTS)
    covered = {number for defect in DEFECTS for number in defect.listed} | {entry.listed for entry in NO_PLACE}
    assert set(LISTED) <= covered


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted(defect: Defect) -> None:
    """The text to replace stands where the catalogue says, once, and the edited source is another program."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", defect.name) and defect.about.endswith(".")
    assert defect.sources()


# --- planting ---------------------------------------------------------------------------------------------------------


def _defect(*edits: tuple[str, ...]) -> Defect:
    return Defect("a-name", "About.", tuple(Edit(*edit) for edit in edits))


@pytest.mark.parametrize(
    "edit, message",
    [
        ((BUDGET, "no such text", ""), "stands 0 times"),
        ((BUDGET, "import", ""), "times, not once"),
        ((BUDGET, "SHARE = 0.1", "SHARE  =  0.1"), "says the same"),
        ((BUDGET, "SHARE = 0.1", "SHARE = ("), "does not compile"),
        (("ring/compute/accumulator.py", "torch", "", "no_function"), "no_function is defined 0 times"),
        (("ring/compute/accumulator.py", "torch.maximum", "", "Accumulator.merge"), "Accumulator.merge of ring/"),
    ],
)
def test_an_edit_without_its_place_is_refused(edit: tuple[str, ...], message: str) -> None:
    with pytest.raises(CannotPlant, match=f"a-name: .*{message}"):
        _defect(edit).sources()


def test_edits_of_one_file_add_up_within_their_functions() -> None:
    file = "ring/compute/accumulator.py"
    (source,) = (
        _defect((file, "maximum", "minimum", "merge"), (file, "torch.log(", "torch.log2(", "merge")).sources().values()
    )
    assert "torch.minimum(" in source and "torch.log2(" in source


def _known_to_users() -> tuple[object, ...]:
    from ring import agreement
    from ring.comm import exchange
    from ring.plan import blocks, schedule

    number_of_blocks = len(blocks.blocks_of(Pattern.dense(), 8, 1, 1))
    return (
        exchange.accumulator_dtype(torch.float16),
        len(agreement.EXCHANGES),
        schedule.Sizes(1, 1, 1),
        number_of_blocks,
    )


def _failure_types() -> list[int]:
    """Identities of one exception as the worker, which is kept, and code that was imported anew know it."""
    from verification import failures
    from verification.run.processes import worker
    from verification.run.simulation import simulation

    return [id(module.MismatchedMessages) for module in (failures, worker, simulation)]


@pytest.mark.ranks
def test_users_of_changed_code_see_it() -> None:
    changed = _defect(
        ("ring/precision.py", "else torch.float32", "else torch.bfloat16"),
        ("ring/plan/plan.py", '"direct", "gather")', '"direct", "gather", "other")'),
        ("ring/plan/blocks.py", "return tuple(blocks)", "return tuple(blocks * 2)", "blocks_of"),
    )
    with Pool(1, preload=(*PRELOAD, "pytest", "hypothesis")) as pool:  # planting cannot be undone
        ((dtype, exchanges, _, blocks),) = pool.run(_known_to_users)
        assert (dtype, exchanges, blocks) == (torch.float32, 3, 1)
        pool.run(preparation(changed))
        ((dtype, exchanges, _, blocks),) = pool.run(_known_to_users)
        assert (dtype, exchanges, blocks) == (torch.bfloat16, 4, 2)
        (types,) = pool.run(_failure_types)
        assert len(set(types)) == 1


@pytest.mark.ranks
def test_a_module_that_does_not_run_is_refused_by_the_rank() -> None:
    backend = SimBackend(prepare=preparation(_defect((BUDGET, "SHARE = 0.1", "SHARE = 1 / 0"))))
    backend.start(1)
    try:
        with pytest.raises(Unavailable, match=r"a-name: the edited ring\.budget does not run: ZeroDivisionError"):
            EXAMPLES.check(backend, plain(2))
    finally:
        backend.close()


def test_a_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sources must be of modules of the project, got ring\.missing"):
        substitute({"ring.missing": ""})


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["merge-by-plain-average", "one-landing-for-sends-and-receives"])
def test_a_defect_is_killed_and_its_case_holds_without_it(name: str) -> None:
    outcome = trials.try_defect(name, seed=3, limit=300)
    assert outcome.killed and outcome.examples <= 300 and outcome.check and outcome.case is not None
    if "law" not in outcome.case:
        backend = SimBackend()
        try:
            backend.start(1)
            EXAMPLES.check(backend, Case.from_json(json.dumps(outcome.case)))
        finally:
            backend.close()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_defect_of_the_oracle_is_one_of_the_judge_too() -> None:
    """Ranks and oracle agree then, so only a second statement of the same shows it."""
    defect = by_name("oracle-dlse-of-rows-without-weight")
    assert defect.in_oracle and trials.try_defect(defect.name, seed=3, limit=300).killed


def test_a_defect_whose_own_code_does_not_run_is_no_kill() -> None:
    defect, subject = by_name("merge-by-sigmoid"), subjects.Subject(EXAMPLES, plain(2))
    for error in ("UnboundLocalError: cannot access local variable 'top'", "NameError: name 'top' is not defined"):
        found = Found(RankError(f"rank 0 raised: {error}"), subject, "sim")
        with pytest.raises(ToolError, match="merge-by-sigmoid: the edited code does not run: rank 0 raised"):
            trials.outcome_of(defect, found, 1, 0.1)
    found = Found(RankError("rank 0 raised: ValueError: shapes"), subject, "sim")
    assert trials.outcome_of(defect, found, 1, 0.1).killed


@pytest.mark.ranks
@pytest.mark.slow
def test_a_search_that_is_ended_leaves_no_process() -> None:
    words = [
        sys.executable,
        "-m",
        "verification",
        "mutants",
        "--limit",
        "1000000",
        "lse-in-bfloat16",
        "no-mark-before-the-first-second",
    ]
    search = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT
    )
    _until(lambda: len(_processes_of(search.pid)) > 4)
    search.send_signal(signal.SIGTERM)
    search.wait(timeout=60)
    _until(lambda: not _processes_of(search.pid))


def _until(condition: object) -> None:
    assert callable(condition)
    last = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.1)


def _processes_of(session: int) -> list[int]:
    """Processes of that session that have not ended."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(its_session) == session and state not in "ZX":
            pids.append(int(stat.parent.name))
    return pids


# --- the command ------------------------------------------------------------------------------------------------------


def _carried_out(*arguments: str) -> tuple[int, str]:
    parser, console = ArgumentParser(), recording()
    command.add_arguments(parser)
    return command.carry_out(parser.parse_args(arguments), console), printed(console)


def test_a_list_has_what_was_asked_for() -> None:
    status, text = _carried_out(DEFECTS[0].name, "--list")
    assert (
        status == 0 and DEFECTS[0].about in unbroken(text) and "1 seeded defect" in text and DEFECTS[1].name not in text
    )


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        Unavailable, match="argument NAME: 'merge-by-sigmoit' is no defect.*close to it: merge-by-sigmoid"
    ):
        _carried_out("merge-by-sigmoit")


@pytest.mark.parametrize("survivors", (0, 3))
@pytest.mark.parametrize("count", (3, len(DEFECTS)))
def test_outcomes_are_printed_and_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, survivors: int
) -> None:
    outcomes = [
        trials.Outcome(d.name, d.provenance, True, ("gradients", "bytes sent")[n % 2], "wrong result", n + 1, 0.5, {})
        if n < count - survivors
        else trials.Outcome(d.name, d.provenance, False, None, None, 8000, 99.9, None)
        for n, d in enumerate(DEFECTS[:count])
    ]

    def try_all(*_: object) -> Iterator[trials.Outcome]:
        yield from outcomes

    monkeypatch.setattr(command, "try_all", try_all)
    names, file, lines = [o.name for o in outcomes], tmp_path / "all.json", tmp_path / "all.jsonl"
    status, text = _carried_out(*names, "--seed", "5", "--json", str(file), "--jsonl", str(lines))
    assert status == (1 if survivors else 0)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1].startswith(f"{count - survivors} of {count} defects killed, ")
    assert all(f"survived: {o.name}: {by_name(o.name).about}" in unbroken(text) for o in outcomes if not o.killed)
    record = json.loads(file.read_text())
    assert (record["defects"], record["killed"], record["seed"]) == (count, count - survivors, 5)
    assert set(record["mutants"][0]) == {
        "name",
        "provenance",
        "killed",
        "check",
        "kind",
        "examples",
        "seconds",
        "case",
        "ratio",
    }
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["name"], row["check"], row["examples"]) for row in rows] == [
        (o.name, o.check, o.examples) for o in outcomes
    ]
