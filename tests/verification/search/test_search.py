"""The search finds planted defects and shrinks them, and tells a defect of the ranks from a fault of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from rich.console import Console

from reference.pattern import Pattern
from tests.support.plain_case import plain
from tests.support.planted import (
    plant_crash,
    plant_hang,
    plant_receive_first,
    plant_two_defects,
    plant_wrong_result,
    plant_zigzag_back_to_front,
)
from tests.support.printed import printed, recording
from verification import runner
from verification.case import Case
from verification.check import properties
from verification.draw.cases import cases
from verification.failures import RankHang, WrongResult
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend
from verification.search.experiment import ToolError
from verification.search.leaving_out import least, with_less
from verification.search.search import Search

pytestmark = pytest.mark.ranks


def found_by(
    prepare: Callable[[], None] | None,
    world: int = 2,
    examples: int = 150,
    timeout: float = 3.0,
    shrink_backend: bool = False,
    budget: float = 120.0,
) -> list[tuple[Any, Case]]:
    """What is found on gloo, shrunk there or, with `shrink_backend`, in a simulation that has the same defect."""
    backend, simulation = GlooBackend(timeout, prepare), SimBackend(timeout, prepare)
    backend.start(world)
    try:
        report = Report(Console(quiet=True))
        report.start_world(world, examples)
        workplace = simulation if shrink_backend else None
        search = Search(runner.EXAMPLES, backend, report, world, budget, shrink_backend=workplace)
        found = search.explore(examples, 1)
    finally:
        backend.close()
        simulation.close()
    assert all(one.backend == "gloo" for one in found)
    return [(one.failure, one.subject) for one in found]


@pytest.fixture(scope="module")
def ranks() -> Any:
    backend = GlooBackend(10.0)
    backend.start(3)
    yield backend
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("simulated", (False, True))
def test_a_wrong_result_is_found_and_shrunk(simulated: bool) -> None:
    (failure, case), *others = found_by(plant_wrong_result, shrink_backend=simulated)
    assert not {failure.kind for failure, _ in others} - {"wrong result"}
    assert failure.kind == "wrong result" and "out" in str(failure)
    assert case.tokens == 6 and case.pattern == Pattern.dense(causal=True)
    assert (case.dtype, case.heads, case.batch, case.exchange, case.group) == ("float32", 1, 1, "ring", None)
    assert case.world == 1 or not simulated, "on the fewest ranks that show it"


@pytest.mark.slow
def test_a_layout_that_is_not_as_defined_is_named_before_what_follows_from_it() -> None:
    (failure, case), *_ = found_by(plant_zigzag_back_to_front)
    assert "layout: rank 0 holds positions [2, 1, 4]; the zigzag order gives it [0, 3, 4]" in str(failure), str(failure)
    assert properties.broken_by(failure) == "layout as defined"
    assert (case.tokens, case.order, case.heads, case.batch) == (5, "zigzag", 1, 1)


@pytest.mark.slow
def test_a_hang_is_found_shrunk_quickly_and_shown_with_stacks() -> None:
    ((failure, case),) = found_by(plant_hang)
    assert failure.kind == "rank hang" and "time.sleep(3600)" not in str(failure) and "spoil" in str(failure)
    assert "within 3 s" in str(failure), "the minimal case is shown once with the whole timeout"
    assert case.tokens == 4 and case.exchange == "direct" and len(case.ranks) == 2


@pytest.mark.slow
def test_a_hang_of_three_ranks_found_on_four_is_shrunk_in_simulation_and_confirmed_where_it_was_found() -> None:
    ((failure, case),) = found_by(plant_receive_first, world=4, shrink_backend=True)
    assert failure.kind == "rank hang" and "within 3 s" in str(failure) and "(world of 3)" in str(failure)
    assert (case.world, case.group, case.tokens, case.exchange) == (3, None, 3, "ring")
    assert (case.pattern, case.batch, case.heads, case.dtype) == (Pattern.dense(), 1, 1, "float32")


@pytest.mark.slow
def test_a_crash_is_found_and_the_next_world_is_as_good_as_new() -> None:
    ((failure, case),) = found_by(plant_crash)
    assert failure.kind == "rank crash" and "SIGABRT" in str(failure)
    assert case.dtype == "bfloat16" and case.tokens == 1


@pytest.mark.slow
def test_distinct_defects_are_all_reported() -> None:
    found = found_by(plant_two_defects, shrink_backend=True, budget=30)
    assert {failure.kind for failure, _ in found} == {"wrong result", "rank error"}
    assert all(case.batch == 3 for failure, case in found if failure.kind == "rank error")


# --- a check that needs no ranks --------------------------------------------------------------------------------------

Fails = Callable[[Case], Exception | None]


def search_with(ranks: GlooBackend, fails: Fails, report: Report | None = None, **changes: Any) -> Search:
    """A search whose examples hold unless `fails` returns what is to be raised."""

    def check(backend: Any, case: Case) -> dict[str, float]:
        error = fails(case)
        if error is not None:
            raise error
        return {"anything": 0.5}

    report = Report(Console(quiet=True)) if report is None else report
    report.start_world(3, 40)
    shrinks = changes.pop("shrinks_hangs", True)
    return Search(replace(runner.EXAMPLES, check=check, **changes), ranks, report, 3, shrinks_hangs=shrinks)


def test_what_fails_like_a_reported_one_is_counted(ranks: GlooBackend) -> None:
    failing, report = set[str](), Report(recording())

    def fails(case: Case) -> Exception | None:
        if case.seed % 2 == 0:
            return None
        failing.add(case.to_json())
        return WrongResult("values: out is wrong")

    assert len(search_with(ranks, fails, report).explore(40, 0)) == 1
    report.end_world()
    found = re.search(r"(\d+) more examples failed", printed(report.console))
    assert report.examples == 40 and found is not None and 0 < int(found[1]) < len(failing)


def test_examples_are_as_many_as_asked_for_and_repeat_with_the_seed(ranks: GlooBackend) -> None:
    drawn: list[list[str]] = []
    for seed in (1, 1, 2):
        seen: list[str] = []
        report = Report(Console(quiet=True))
        assert search_with(ranks, lambda case, seen=seen: seen.append(case.to_json()), report).explore(40, seed) == []  # type: ignore[misc]
        assert report.examples == len(seen) == 40
        drawn.append(seen)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_failure_that_does_not_come_back_is_still_a_failure(ranks: GlooBackend) -> None:
    calls: list[str] = []

    def fails(case: Case) -> Exception | None:
        calls.append(case.to_json())
        return WrongResult("values: out is wrong, this once") if len(calls) == 5 else None

    (found,) = search_with(ranks, fails).explore(40, 1)
    assert str(found.failure) == "values: out is wrong, this once" and found.subject.to_json() == calls[4]
    assert calls.count(calls[4]) == 1, "a failing example is never run again"


CROWDED = plain(
    3, group=(0, 2), tokens=9, cuts=(0, 4, 9), bucket=2, scale=0.5, strided=True, again="meta",
    pattern=replace(Pattern.dense(), documents=(4, 5)),
)  # fmt: skip


def shrunk(ranks: GlooBackend, fails: Callable[[Case], bool], **changes: Any) -> Case:
    """What is left of a subject that no other draw leads away from."""
    wrong = WrongResult("values: out is wrong")
    drawn = changes | {"draw": lambda world: st.just(CROWDED)}
    found = search_with(ranks, lambda case: wrong if fails(case) else None, **drawn).find(1, "crowded")
    assert found is not None
    case: Case = found.subject
    return case


LEAST = plain(3, tokens=1, heads=1, kv_heads=1, head_dim=1, kernel="auto")


def test_what_a_failure_does_not_need_is_left_out(ranks: GlooBackend) -> None:
    assert shrunk(ranks, lambda case: case.tokens == 9) == replace(LEAST, tokens=9)
    assert shrunk(ranks, lambda case: case.cuts is not None) == replace(LEAST, group=(0, 2), cuts=(0, 1, 1))
    both = shrunk(ranks, lambda case: case.pattern.documents is not None and case.bucket == 2)
    assert both == replace(LEAST, bucket=2, pattern=replace(Pattern.dense(), documents=(1,)))


def test_every_case_with_less_is_another_one_that_is_nearer_to_the_least() -> None:
    """Else shrinking would go round in a circle."""

    @seeded(1)
    @settings(max_examples=300, database=None, deadline=None)
    @given(cases(3))
    def holds(case: Case) -> None:
        assert replace(least(case, lambda simpler: True), dtype="float32") == LEAST
        for simpler in with_less(case):
            assert simpler != case and simpler.to_json() != case.to_json()

    holds()


def test_nothing_is_left_out_where_nobody_says_what_may_be_drawn(ranks: GlooBackend) -> None:
    assert shrunk(ranks, lambda case: True, premise=None) == CROWDED


@pytest.mark.parametrize("shrinks", (True, False))
def test_a_hang_is_shrunk_only_where_it_may(ranks: GlooBackend, shrinks: bool) -> None:
    seen: list[Case] = []

    def fails(case: Case) -> Exception | None:
        seen.append(case)
        return RankHang("no answer") if case.tokens >= 4 else None

    search, timeout = search_with(ranks, fails, shrinks_hangs=shrinks), ranks.timeout
    found = search.find(100, "hang")
    ranks.timeout = timeout
    first = next(number for number, case in enumerate(seen) if case.tokens >= 4)
    assert found is not None and search.examples == first
    assert (len(seen) > first + 1) == shrinks and (found.subject.tokens == 4 or not shrinks)
    assert shrinks or found.subject is seen[first]


def test_a_strategy_that_lets_nothing_through_ends_the_search(ranks: GlooBackend) -> None:
    draw = runner.EXAMPLES.draw
    search = search_with(ranks, lambda case: None, draw=lambda world: draw(world).filter(lambda case: False))
    assert search.explore(100, 1) == [] and search.examples == 0


def test_a_fault_of_the_machinery_is_no_counter_example(ranks: GlooBackend) -> None:
    with pytest.raises(ToolError):
        search_with(ranks, lambda case: KeyError("not the ranks' fault")).explore(40, 1)
