"""The search finds planted defects and shrinks them, and tells a defect of the ranks from a fault of its own."""

from __future__ import annotations

import io
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
def test_a_wrong_result_is_found_and_shrunk() -> None:
    (failure, case), *others = found_by(plant_wrong_result)
    assert not {failure.kind for failure, _ in others} - {"wrong result"}
    assert failure.kind == "wrong result" and "out" in str(failure)
    assert case.tokens == 6 and case.pattern == Pattern.dense(causal=True)
    assert (case.dtype, case.heads, case.batch, case.exchange, case.group) == ("float32", 1, 1, "ring", None)


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
def test_a_wrong_result_found_on_gloo_is_shrunk_in_simulation_alike() -> None:
    (failure, case), *_ = found_by(plant_wrong_result, shrink_backend=True)
    assert failure.kind == "wrong result" and case.tokens == 6 and case.pattern == Pattern.dense(causal=True)
    assert case.world == 1, "on the fewest ranks that show it"


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


def test_what_fails_like_a_reported_one_is_counted(ranks: GlooBackend) -> None:
    failing: set[str] = set()

    def check(backend: Any, case: Case) -> dict[str, float]:
        if case.seed % 2:
            failing.add(case.to_json())
            raise WrongResult("values: out is wrong")
        return {"anything": 0.5}

    report = Report(Console(file=io.StringIO()))
    report.start_world(3, 40)
    assert len(Search(replace(runner.EXAMPLES, check=check), ranks, report, 3).explore(40, 0)) == 1
    report.end_world()
    assert isinstance(report.console.file, io.StringIO)
    found = re.search(r"(\d+) more examples failed", report.console.file.getvalue())
    assert report.examples == 40 and found is not None and 0 < int(found[1]) < len(failing)


def test_examples_are_as_many_as_asked_for_and_repeat_with_the_seed(ranks: GlooBackend) -> None:
    drawn: list[list[str]] = []
    for seed in (1, 1, 2):
        seen: list[str] = []

        def check(backend: Any, case: Case, seen: list[str] = seen) -> dict[str, float]:
            seen.append(case.to_json())
            return {"anything": 0.5}

        report = Report(Console(quiet=True))
        report.start_world(3, 40)
        experiment = replace(runner.EXAMPLES, check=check)
        assert Search(experiment, ranks, report, 3).explore(40, seed) == []
        assert report.examples == len(seen) == 40
        drawn.append(seen)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_failure_that_does_not_come_back_is_still_a_failure(ranks: GlooBackend) -> None:
    calls: list[str] = []

    def check(backend: Any, case: Case) -> dict[str, float]:
        calls.append(case.to_json())
        if len(calls) == 5:
            raise WrongResult("values: out is wrong, this once")
        return {}

    report = Report(Console(quiet=True))
    report.start_world(3, 40)
    found = Search(replace(runner.EXAMPLES, check=check), ranks, report, 3).explore(40, 1)
    ((failure, case),) = ((one.failure, one.subject) for one in found)
    assert str(failure) == "values: out is wrong, this once" and case.to_json() == calls[4]
    assert calls.count(calls[4]) == 1, "a failing example is never run again"


CROWDED = plain(
    3, group=(0, 2), tokens=9, cuts=(0, 4, 9), bucket=2, scale=0.5, strided=True, again="meta",
    pattern=replace(Pattern.dense(), documents=(4, 5)),
)  # fmt: skip


def shrunk(ranks: GlooBackend, fails: Callable[[Case], bool]) -> Case:
    """What is left of a subject that no other draw leads away from."""

    def check(backend: Any, case: Case) -> dict[str, float]:
        if fails(case):
            raise WrongResult("values: out is wrong")
        return {}

    one = replace(runner.EXAMPLES, draw=lambda world: st.just(CROWDED), check=check)
    found = Search(one, ranks, Report(Console(quiet=True)), 3).find(1, "crowded")
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
    def check(backend: Any, case: Case) -> dict[str, float]:
        raise WrongResult("values: out is wrong")

    bare = replace(runner.EXAMPLES, draw=lambda world: st.just(CROWDED), check=check, premise=None)
    found = Search(bare, ranks, Report(Console(quiet=True)), 3).find(1, "crowded")
    assert found is not None and found.subject == CROWDED


@pytest.mark.parametrize("shrinks", (True, False))
def test_a_hang_is_shrunk_only_where_it_may(ranks: GlooBackend, shrinks: bool) -> None:
    seen: list[Case] = []

    def check(backend: Any, case: Case) -> dict[str, float]:
        seen.append(case)
        if case.tokens >= 4:
            raise RankHang("no answer")
        return {}

    search = Search(replace(runner.EXAMPLES, check=check), ranks, Report(Console(quiet=True)), 3, shrinks_hangs=shrinks)
    timeout = ranks.timeout
    found = search.find(100, "hang")
    ranks.timeout = timeout
    first = next(number for number, case in enumerate(seen) if case.tokens >= 4)
    assert found is not None and search.examples == first
    assert (len(seen) > first + 1) == shrinks and (found.subject.tokens == 4 or not shrinks)
    assert shrinks or found.subject is seen[first]


def test_a_strategy_that_lets_nothing_through_ends_the_search(ranks: GlooBackend) -> None:
    nothing = replace(runner.EXAMPLES, draw=lambda world: runner.EXAMPLES.draw(world).filter(lambda case: False))
    search = Search(nothing, ranks, Report(Console(quiet=True)), 3)
    assert search.explore(100, 1) == [] and search.examples == 0


def test_a_fault_of_the_machinery_is_no_counter_example(ranks: GlooBackend) -> None:
    def check(backend: Any, case: Case) -> dict[str, float]:
        raise KeyError("not the ranks' fault")

    report = Report(Console(quiet=True))
    report.start_world(3, 40)
    with pytest.raises(ToolError):
        Search(replace(runner.EXAMPLES, check=check), ranks, report, 3).explore(40, 1)
