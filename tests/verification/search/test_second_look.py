"""What the simulation knows of a failure's cause stands beside what gloo showed of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from rich.console import Console

from tests.support.plain_case import plain
from tests.support.planted import plant_receive_first, plant_wrong_result
from verification import runner
from verification.case import Case
from verification.failures import RankHang, WrongResult
from verification.mutants.catalogue import by_name
from verification.mutants.plant import preparation
from verification.report.report import Report
from verification.run.backends import Backend, GlooBackend, SimBackend
from verification.search.search import Search
from verification.search.second_look import cause_in

pytestmark = pytest.mark.ranks

EARLY = (
    r"in the simulation: rank (\d) reads the receive buffer of 'keys and values \d' "
    r"\(\d+ bytes of float32\) from rank (\d) before that message was waited for"
)


WRONG = WrongResult("values: out is wrong")


@pytest.fixture(scope="module")
def hasty() -> Iterator[SimBackend]:
    """Ranks that wait for keys after they have used them."""
    with closing(SimBackend(prepare=preparation(by_name("keys-waited-for-after-use")))) as simulation:
        yield simulation


def cause_of(prepare: Callable[[], object] | None, case: Case, failure: Any = WRONG) -> str | None:
    with closing(SimBackend(prepare=prepare)) as simulation:
        return cause_in(simulation, runner.EXAMPLES, case, failure)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
def test_a_buffer_that_is_read_before_its_message_was_waited_for_is_named(hasty: SimBackend, exchange: str) -> None:
    case = plain(3, tokens=9, exchange=exchange)
    found = re.fullmatch(EARLY, cause_in(hasty, runner.EXAMPLES, case, WRONG) or "")
    assert found is not None and found[1] != found[2]


def test_ranks_are_named_as_in_the_world_not_as_in_the_group(hasty: SimBackend) -> None:
    case = plain(6, group=(2, 5), tokens=4)
    found = re.fullmatch(EARLY, cause_in(hasty, runner.EXAMPLES, case, WRONG) or "")
    assert found is not None and {found[1], found[2]} == {"2", "5"}


def test_a_message_that_is_never_waited_for_is_named() -> None:
    said = cause_of(preparation(by_name("keys-read-before-they-landed")), plain(2), RankHang("no answer"))
    assert said is not None and re.match("in the simulation, broken contract: .*never waited for batch 0", said)


def test_a_hang_of_ranks_that_wait_in_a_circle_is_told_as_one() -> None:
    said = cause_of(plant_receive_first, plain(3, tokens=6), RankHang("no answer"))
    assert said is not None and "in the simulation, rank hang: deadlock of 3 ranks: rank " in said


@pytest.mark.parametrize("prepare", (None, plant_wrong_result), ids=("nothing wrong", "wrong whatever comes when"))
def test_where_no_wait_is_missing_nothing_is_said(prepare: Callable[[], None] | None) -> None:
    assert cause_of(prepare, plain(3, tokens=9, pattern=plain(3).pattern)) is None


def wrong_on_gloo(backend: Backend, case: Case) -> dict[str, float]:
    """As a race that is always lost there."""
    if backend.name == "gloo":
        raise WrongResult("values: out is 3e-41")
    return runner.check_case(backend, case)


def test_a_wrong_result_found_on_gloo_has_the_missing_wait_in_its_report(hasty: SimBackend, tmp_path: Path) -> None:
    report, drawn = Report(Console(quiet=True)), st.integers(4, 12).map(lambda tokens: plain(2, tokens=tokens))
    experiment = replace(runner.EXAMPLES, check=wrong_on_gloo, draw=lambda world: drawn)
    with closing(GlooBackend()) as gloo:
        gloo.start(2)
        search = Search(experiment, gloo, report, 2, shrink_backend=hasty)
        (found,) = search.explore(5, 1)
        told = runner.save(found, search, tmp_path)
    assert (told.kind, told.backend, found.subject.tokens) == ("wrong result", "gloo", 2)
    first, second = told.message.splitlines()
    assert first == "values: out is 3e-41" and re.fullmatch(EARLY, second)
