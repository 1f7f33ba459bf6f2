"""Seeded defects: the catalogue, how they are planted, and that properties find some of them end to end."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ring import budget
from ring.comm import transport
from tests.support import mutant_tasks
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.laws import LAWS
from verification.cli import mutants as command
from verification.failures import RankError
from verification.mutants import DEFECTS, NO_PLACE, CannotPlant, Defect, Edit, by_name
from verification.mutants import trials as runner
from verification.mutants.plant import graft, plant
from verification.report.report import Report
from verification.run.backends import PRELOAD, SimBackend
from verification.run.processes.pool import Pool
from verification.runner import EXAMPLES
from verification.search.search import Found, Search, ToolError

LISTED = range(1, 43)  # the project's list of defect classes seen in public ring-attention code


@pytest.fixture
def process() -> Iterator[Pool]:
    """One that may be spoiled: planting cannot be undone."""
    with Pool(1, preload=(*PRELOAD, "tests.support.mutant_tasks")) as pool:
        yield pool


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_names_are_unique_and_kebab_case() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(set(names)) == len(names) >= 60
    for name in names:
        assert name == name.lower() and not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-"), name


def test_every_defect_says_whence_it_is_and_what_it_does() -> None:
    for defect in DEFECTS:
        assert defect.provenance and defect.about.endswith(".") and defect.edits, defect.name
        assert set(defect.listed) <= set(LISTED), defect.name
    for entry in NO_PLACE:
        assert entry.provenance and entry.why.rstrip(")").endswith("."), entry.name


def test_every_class_of_the_list_has_a_defect_or_a_reason() -> None:
    covered = {number for defect in DEFECTS for number in defect.listed} | {entry.listed for entry in NO_PLACE}
    assert set(LISTED) - covered == set()


def test_only_transports_need_real_process_groups() -> None:
    for defect in DEFECTS:
        touched = {edit.module for edit in defect.edits}
        assert (defect.backend == "gloo") == (touched == {transport}), defect.name


def test_every_defect_can_be_planted(process: Pool) -> None:
    assert process.run(mutant_tasks.plant_all, timeout=100) == [[]]


# --- planting ---------------------------------------------------------------------------------------------------------


def test_users_of_grafted_code_see_it(process: Pool) -> None:
    (seen,) = process.run(mutant_tasks.steps_kept)
    assert seen["function"] == (torch.bfloat16, torch.bfloat16)  # through `from` imports
    assert seen["constant"] == ("ring", "direct", "gather", "other")
    assert seen["field"] == 3
    assert seen["cached"] == (1, 2)


REFUSED = {
    "a function more": ("ring.strided_view", "import torch\n\n", "import torch\n\n\ndef more() -> None: ...\n\n\n"),
    "a decorator less": ("ring.strided_view", "@lru_cache(maxsize=256)\n", ""),
    "another cache": ("ring.strided_view", "maxsize=256", "maxsize=1"),
    "another import": ("ring.strided_view", "from ring.plan.rows import Rows", "from ring.plan.rows import Rows, Fold"),
    "another base": ("ring.layout", "class Run(NamedTuple):", "class Run(tuple):"),
    "another member": ("ring.plan.range_pairs", "FULL = 0", "FULL = 7"),
    "another value of no plain type": ("ring.agreement", "torch.bfloat16, torch.float16)", "torch.bfloat16)"),
    "what does not compile": ("ring.budget", "SHARE = 0.1", "SHARE = ("),
    "what does not run": ("ring.budget", "SHARE = 0.1", "SHARE = 1 / 0"),
    "a name that nobody binds": ("ring.compute.accumulator", "top + torch.log(total)", "peak + torch.log(total)"),
    "an attribute that a module lacks": (
        "ring.compute.accumulator",
        "top + torch.log(total)",
        "top + torch.logg(total)",
    ),
    "an import that fails when it is reached": (
        "ring.compute.accumulator",
        "    return merged, top + torch.log(total)",
        "    from ring.strided_view import Shelf\n\n    return merged, Shelf(top, total)",
    ),
}


def test_what_cannot_be_grafted_is_refused(process: Pool) -> None:
    (said,) = process.run(mutant_tasks.refusals, list(REFUSED.values()))
    assert [name for name, refusal in zip(REFUSED, said, strict=True) if not refusal] == []
    unbound = [refusal.partition("bound nowhere: ")[2] for refusal in said if "bound nowhere" in refusal]
    assert unbound == ["peak", "torch.logg", "ring.strided_view.Shelf"]
    for (module, _, _), refusal in zip(REFUSED.values(), said, strict=True):
        assert module in refusal


def test_a_source_that_says_the_same_is_refused() -> None:
    with pytest.raises(CannotPlant, match=r"ring\.budget: the edited source says the same"):
        graft("ring.budget", mutant_tasks.source("ring.budget") + "\n# a comment\n")


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("no such text", "", "stands 0 times"),
        ("import", "", "times, not once"),
        ("SHARE = 0.1", "SHARE = 0.1", "says the same"),
        ("SHARE = 0.1", "SHARE  =  0.1", "says the same"),
    ],
)
def test_an_edit_that_does_not_apply_is_refused(was: str, becomes: str, said: str) -> None:
    defect = Defect("a-name", "About.", (Edit(budget, was, becomes),))
    with pytest.raises(CannotPlant, match=f"a-name: .*{said}"):
        plant(defect)


def test_edits_of_one_file_add_up() -> None:
    edits = (Edit(budget, "SHARE = 0.1", "SHARE = 0.2"), Edit(budget, "LEAST = 32", "LEAST = 1"))
    (source,) = Defect("both", "About.", edits).sources().values()
    assert "SHARE = 0.2" in source and "LEAST = 1" in source


# --- the search -------------------------------------------------------------------------------------------------------


def test_a_hunt_draws_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[runner.Subject] = []

    def check(subject: runner.Subject, backend: object) -> dict[str, float]:
        seen.append(subject)
        return {}

    monkeypatch.setattr(runner.Subject, "check", check)
    search = Search(runner.EVERYTHING, SimBackend(), Report(Console(quiet=True)), max(runner.WORLDS))
    assert search.find(300, "afresh") is None
    assert search.examples == len(seen) == len({json.dumps(subject.record()) for subject in seen}) == 300
    names = [subject.experiment.name for subject in seen]
    assert {EXAMPLES.name, *(law.name for law in LAWS if law.share >= 0.02)} <= set(names)  # the rarest may be missing
    assert 0.7 < names.count(EXAMPLES.name) / 300 < 0.95
    worlds = [subject.case.world for subject in seen]
    assert set(worlds) == set(runner.WORLDS) and worlds.count(1) < 60


@pytest.mark.parametrize("name", ["merge-by-plain-average", "one-landing-for-sends-and-receives"])
def test_a_defect_is_killed_and_its_case_holds_without_it(name: str) -> None:
    outcome = runner.search(name, seed=3, limit=300)
    assert outcome.killed and outcome.examples <= 300 and outcome.check
    assert outcome.case is not None
    if "law" not in outcome.case:
        backend = SimBackend()
        try:
            backend.start(1)
            EXAMPLES.check(backend, Case.from_json(json.dumps(outcome.case)))
        finally:
            backend.close()


def test_command_tells_of_progress_and_survivors_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LINE_EVERY", 0.1)
    parser = ArgumentParser()
    command.add_parser(parser.add_subparsers())
    file, name = tmp_path / "mutants.json", "carried-gradients-dropped"
    console = Console(record=True, width=150)
    options = parser.parse_args(["mutants", name, "--limit", "1", "--seed", "5", "--json", str(file)])
    assert command.main(options, console) == 1  # one example, the simplest, shows nothing
    found = json.loads(file.read_text())
    assert {key: found[key] for key in ("defects", "killed", "survived", "within_200", "seed", "limit")} == {
        "defects": 1, "killed": 0, "survived": 1, "within_200": 0, "seed": 5, "limit": 1,
    }  # fmt: skip
    (outcome,) = found["mutants"]
    assert (outcome["name"], outcome["provenance"]) == (name, by_name(name).provenance)
    assert (outcome["killed"], outcome["check"], outcome["examples"], outcome["case"]) == (False, None, 1, None)
    said = console.export_text()
    assert by_name(name).about in said
    progress = r"^without any defect, on sim: (\d+) of 60 examples held so far$"
    counts = [int(n) for n in re.findall(progress, said, re.MULTILINE)]
    assert counts == sorted(counts) and 0 < counts[-1] <= 60 and len(set(counts)) > 2, said


def test_a_defect_whose_own_code_does_not_run_is_no_kill() -> None:
    subject = runner.Subject(EXAMPLES, plain(2))
    for error in ("UnboundLocalError: cannot access local variable 'top'", "NameError: name 'top' is not defined"):
        found = Found(RankError(f"rank 0 raised: {error}"), subject, "sim")
        with pytest.raises(ToolError, match="merge-by-sigmoid: the edited code does not run: rank 0 raised"):
            runner.outcome_of(by_name("merge-by-sigmoid"), runner.Chase(found, 1, 0.1))
    found = Found(RankError("rank 0 raised: ValueError: shapes"), subject, "sim")
    assert runner.outcome_of(by_name("merge-by-sigmoid"), runner.Chase(found, 1, 0.1)).killed


def test_a_tool_that_fails_is_no_kill(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    command.add_parser(parser.add_subparsers())
    assert command.main(parser.parse_args(["mutants", "no-such-defect"]), Console()) == 2
    said = capsys.readouterr()
    assert "argument NAME: 'no-such-defect' is no defect" in said.err and not said.out


def test_a_list_has_what_was_asked_for() -> None:
    parser, console = ArgumentParser(), Console(record=True, width=150)
    command.add_parser(parser.add_subparsers())
    name = DEFECTS[0].name
    assert command.main(parser.parse_args(["mutants", name, "--list"]), console) == 0
    text = console.export_text()
    assert name in text and "1 seeded defect" in text and DEFECTS[1].name not in text
