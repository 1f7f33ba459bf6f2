"""`python -m verification mutants`: what it prints stays within 80 columns, with and without a terminal."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.printed import printed, recording, unbroken
from verification.__main__ import main
from verification.cli import mutants as command
from verification.mutants import trials
from verification.mutants.catalogue import DEFECTS, by_name
from verification.mutants.defect import NotSane
from verification.mutants.trials import Outcome
from verification.report import progress
from verification.runner import EXAMPLES


def parsed(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def outcomes(count: int, survivors: int = 0) -> list[Outcome]:
    """Of the first defects of the catalogue, of which the last ones survive."""
    found = []
    for number, defect in enumerate(DEFECTS[:count]):
        killed = number < count - survivors
        check, kind = ("gradients", "bytes sent")[number % 2], "wrong result"
        found.append(
            Outcome(defect.name, defect.provenance, killed, check, kind, number + 1, 0.5, None)
            if killed
            else Outcome(defect.name, defect.provenance, False, None, None, 8000, 99.9, None)
        )
    return found


@pytest.mark.slow
def test_it_tells_of_progress_and_survivors_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LINE_EVERY", 0.1)
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    file, name, console = tmp_path / "mutants.json", "carried-gradients-dropped", recording()
    options = parsed(name, "--limit", "1", "--seed", "5", "--json", str(file))
    assert command.carry_out(options, console) == 1  # one example, the simplest, shows nothing
    found = json.loads(file.read_text())
    assert {key: found[key] for key in ("defects", "killed", "survived", "within_200", "seed", "limit")} == {
        "defects": 1, "killed": 0, "survived": 1, "within_200": 0, "seed": 5, "limit": 1,
    }  # fmt: skip
    (outcome,) = found["mutants"]
    ((experiment, (examples, seconds)),) = outcome["spent"].items()
    assert experiment == EXAMPLES.name and examples == 1 and seconds > 0.0
    assert (outcome["name"], outcome["provenance"]) == (name, by_name(name).provenance)
    assert (outcome["killed"], outcome["check"], outcome["examples"], outcome["case"]) == (False, None, 1, None)
    said = printed(console)
    assert by_name(name).about in unbroken(said)
    held = r"^without any defect, on sim: (\d+) of 60 examples held so far$"
    counts = [int(n) for n in re.findall(held, said, re.MULTILINE)]
    assert counts == sorted(counts) and 0 < counts[-1] <= 60 and len(set(counts)) > 2, said
    assert said.splitlines()[-1].startswith("0 of 1 defect killed, 0 of them within 200 examples, in ")


def carried_out(
    monkeypatch: pytest.MonkeyPatch, found: list[Outcome], *arguments: str, terminal: bool = False
) -> tuple[int, str]:
    """The status, and what was printed, of a search that comes to these outcomes."""

    def try_all(names: list[str], seed: int, limit: int, jobs: int, say: Callable[[str], None]) -> Iterator[Outcome]:
        for outcome in found:
            say(f"{outcome.name}: 12 of 8000 examples held so far")
            yield outcome

    monkeypatch.setattr(command, "try_all", try_all)
    console = recording(terminal)
    status = command.carry_out(parsed(*(outcome.name for outcome in found), *arguments), console)
    return status, printed(console)


@pytest.mark.parametrize("terminal", (False, True))
@pytest.mark.parametrize(("count", "survivors"), ((3, 0), (20, 2), (len(DEFECTS), 0), (len(DEFECTS), 3)))
def test_lines_and_columns(monkeypatch: pytest.MonkeyPatch, count: int, survivors: int, terminal: bool) -> None:
    found = outcomes(count, survivors)
    status, said = carried_out(monkeypatch, found, terminal=terminal)
    assert status == (1 if survivors else 0)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said))
    assert max(map(len, lines)) <= 80
    *_, verdict = (line for line in lines if line.strip())
    assert verdict.startswith(f"{count - survivors} of {count} defects killed, ")
    if count > command.FEW:
        assert sum(not line.startswith(("defects ", " ")) for line in lines) <= 40, said
        assert any(re.match(r"gradients +\d+ ", line) for line in lines)
    for outcome in found[count - survivors :]:
        assert f"survived: {outcome.name}: {by_name(outcome.name).about}" in unbroken("\n".join(lines))


def test_kills_a_minute_are_those_of_the_experiment_that_found_the_defect_first() -> None:
    drawn = [
        replace(outcomes(1)[0], experiment="a law", spent={"examples": (9, 30.0), "a law": (1, 10.0)}),
        replace(outcomes(1)[0], experiment="examples", spent={"examples": (3, 30.0)}),
        replace(outcomes(1, 1)[0], spent={"examples": (50, 60.0), "a law": (5, 10.0)}),
    ]
    table = [re.split(r"  +", line) for line in command.by_worth(drawn)[1:]]
    assert table == [["a law", "6", "20.0", "1", "3.0"], ["examples", "62", "120.0", "1", "0.5"]]


def test_a_tool_that_fails_is_no_kill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def try_all(*_: Any, **__: Any) -> Iterator[Outcome]:
        raise NotSane("without any defect an example fails")

    monkeypatch.setattr(command, "try_all", try_all)
    assert main(("mutants", DEFECTS[0].name)) == 2
    assert "error: without any defect an example fails" in capsys.readouterr().err


def test_a_list_has_what_was_asked_for() -> None:
    console, defect = recording(), DEFECTS[0]
    assert command.carry_out(parsed(defect.name, "--list"), console) == 0
    text = unbroken(printed(console))
    assert text.startswith(f"{defect.name} (") and defect.about in text and text.endswith("1 seeded defect")
