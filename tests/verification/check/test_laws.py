"""Laws between Cases hold, and a planted defect breaks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from tests.support.planted import plant_16_bit_accumulator, plant_swallowed_error
from verification import runner
from verification.case import Case
from verification.check.laws import LAWS, How, Law
from verification.check.laws.growth import check_growth
from verification.check.laws.mistakes import check_refused
from verification.check.laws.order import permuted
from verification.failures import WrongResult
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.search.search import Search

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ranks() -> Any:
    backend = GlooBackend(10.0)
    backend.start(3)
    yield backend
    backend.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_laws_hold(law: Law, ranks: GlooBackend) -> None:
    report = Report(Console(quiet=True))
    report.start_world(3, 8)
    found = Search(runner.law_experiment(law), ranks, report, 3).explore(min(8, law.most), 1)
    assert not found, str(found)


def broken(prepare: Callable[[], None], law: Callable[..., float], case: Case, how: How) -> str:
    backend = GlooBackend(10.0, prepare)
    backend.start(case.world)
    try:
        with pytest.raises(WrongResult) as caught:
            law(backend, case, how)
    finally:
        backend.close()
    return str(caught.value)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
def test_a_16_bit_accumulator_makes_the_error_grow(exchange: str) -> None:
    case = plain(8, tokens=512, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16", exchange=exchange)
    message = broken(plant_16_bit_accumulator, check_growth, case, {"shift": 1})
    assert "the RMS error of out" in message


def test_a_rank_that_does_not_refuse_is_found() -> None:
    case = plain(2)
    how = {"mistakes": [["one token too many in q", 1]]}
    backend = GlooBackend(2.0, plant_swallowed_error)
    backend.start(2)
    try:
        with pytest.raises(AssertionError):
            check_refused(backend, case, how)
    finally:
        backend.close()


def test_patterns_are_permuted_with_their_heads() -> None:
    pattern = Pattern((Branch(8, 2, (0, 1, 1, 0)), Branch(4, 1, 0, range(0, 2))))
    assert permuted(pattern, (2, 3, 0, 1)) == Pattern((Branch(8, 2, (1, 0, 0, 1)), Branch(4, 1, 0, range(2, 4))))
    assert permuted(pattern, (0, 2, 1, 3)) is None, "heads 0 and 1 would be no range"
