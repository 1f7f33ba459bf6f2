"""The search finds planted defects, shrinks them, says what it knows of their cause, and tells them from its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.slices import Slice
from tests.support.backends import shared
from tests.support.plain_case import plain
from tests.support.planted import plant_receive_first, plant_wrong_result
from tests.support.printed import printed, recording, unbroken
from verification import runner
from verification.case import Case, Keys
from verification.check.numbered_exchange import with_number
from verification.experiments import EXAMPLES, check_case
from verification.failures import RankError, RankHang, WrongResult
from verification.mutants.catalogue import by_name
from verification.mutants.plant import preparation
from verification.report.report import Report
from verification.run.backends import GlooBackend, SimBackend
from verification.search.diagnose import cause_in
from verification.search.experiment import ToolError
from verification.search.search import Search
from verification.search.simplify import minimize, simpler_cases
from verification.strategies.cases import cases

pytestmark = pytest.mark.ranks


ranks = shared(lambda: GlooBackend(10.0), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant, world, kind, said, shrunk",
    [
        (plant_wrong_result, 2, "wrong result", "out",
         {"world": 1, "tokens": 6, "pattern": Pattern.dense(True), "dtype": "float32", "heads": 1, "exchange": "ring"}),
        (plant_receive_first, 4, "rank hang", r"within 3 s.*\(world of 3\)",
         {"world": 3, "group": None, "tokens": 3, "exchange": "ring", "pattern": Pattern.dense(), "heads": 1}),
    ],
)  # fmt: skip
def test_failures_are_named_and_shrunk(
    plant: Callable[[], None], world: int, kind: str, said: str, shrunk: dict[str, Any]
) -> None:
    """Found on gloo, shrunk in a simulation that has the same defect; a hang's least Case has the whole timeout."""
    with closing(GlooBackend(3.0, plant)) as backend, closing(SimBackend(3.0, plant)) as simulation:
        backend.start(world)
        search = Search(EXAMPLES, backend, Report(recording()), world, 120.0, shrink_backend=simulation)
        failures = search.explore(150, 1)
    found = next(one for one in failures if one.failure.kind == kind)
    assert re.search(said, str(found.failure), re.DOTALL), str(found.failure)
    assert found.backend == "gloo" and found.subject == replace(found.subject, **shrunk)
    assert {one.failure.kind for one in failures} <= {"wrong result", kind}


WRONG = WrongResult("values: out is wrong")


def search_with(ranks: GlooBackend, fails: Any, report: Report | None = None, **changes: Any) -> Search:
    """A search whose examples hold unless `fails` returns what is to be raised."""

    def check(backend: Any, case: Case) -> dict[str, float]:
        error = fails(case)
        if error is not None:
            raise error
        return {"anything": 0.5}

    report = Report(recording()) if report is None else report
    report.start_world(3, 40)
    shrinks = changes.pop("shrinks_hangs", True)
    return Search(replace(EXAMPLES, check=check, **changes), ranks, report, 3, shrinks_hangs=shrinks)


def test_each_kind_of_failure_is_reported_once(ranks: GlooBackend) -> None:
    failing, report = set[str](), Report(recording())

    def fails(case: Case) -> Exception | None:
        if case.seed % 2 == 0:
            return None
        failing.add(case.to_json())
        return WRONG if case.batch == 1 else RankError("rank 0 raised: it is too many")

    found = search_with(ranks, fails, report).explore(40, 0)
    assert sorted(one.failure.kind for one in found) == ["rank error", "wrong result"]
    report.end_world()
    more = re.search(r"(\d+) further draws failed", unbroken(printed(report.console)))
    assert report.examples == 40 and more is not None and 0 < int(more[1]) < len(failing)


def test_examples_repeat_with_the_seed(ranks: GlooBackend) -> None:
    drawn: list[list[str]] = [[], [], []]
    for seed, seen in zip((1, 1, 2), drawn, strict=True):
        search = search_with(ranks, lambda case, seen=seen: seen.append(case.to_json()))
        assert search.explore(40, seed) == [] and search.examples == len(seen) == 40
    assert drawn[0] == drawn[1] != drawn[2]


def test_unrepeatable_failures_are_failures(ranks: GlooBackend) -> None:
    calls: list[str] = []

    def fails(case: Case) -> Exception | None:
        calls.append(case.to_json())
        return WrongResult("values: out is wrong, this once") if len(calls) == 5 else None

    (found,) = search_with(ranks, fails).explore(40, 1)
    assert str(found.failure) == "values: out is wrong, this once" and found.subject.to_json() == calls[4]
    assert found.before is None and "alone on new ranks the example holds" in found.failure.__notes__[0]


CROWDED = plain(
    3, group=(0, 2), tokens=9, cuts=(0, 4, 9), bucket=2, scale=0.5, strided=True, again="meta",
    pattern=Pattern.dense(documents=(4, 5)), keys=Keys(9, "zigzag", (0, 4, 9)), hosts=2,
)  # fmt: skip
LEAST = plain(3, tokens=1, heads=1, kv_heads=1, head_dim=1, kernel="auto")


@pytest.mark.parametrize(
    "fails, changes, left",
    [
        (lambda case: case.tokens == 9, {}, replace(LEAST, tokens=9)),
        (lambda case: case.cuts is not None, {}, replace(LEAST, group=(0, 2), cuts=(0, 1, 1))),
        (lambda case: case.keys is not None, {}, replace(LEAST, keys=Keys(1))),
        (lambda case: case.pattern.documents is not None and case.bucket == 2, {},
         replace(LEAST, bucket=2, pattern=Pattern.dense(documents=(1,)))),
        (lambda case: True, {"validate": None}, CROWDED),  # nobody says what may be drawn
    ],
)  # fmt: skip
def test_shrinking_leaves_out_needless_fields(ranks: GlooBackend, fails: Any, changes: Any, left: Case) -> None:
    """No other draw leads away from the subject."""
    search = search_with(
        ranks, lambda case: WRONG if fails(case) else None, draw=lambda world: st.just(CROWDED), **changes
    )
    found = search.find(1, "crowded")
    assert found is not None and found.subject == left


def test_chunks_are_left_out_or_as_long_as_the_tokens() -> None:
    case = plain(2, tokens=40, order="dealt chunks", same_bits=16, keys=Keys(40, "chunks"), bucket=20)
    without = minimize(case, lambda case: case.tokens > 20)
    assert (without.same_bits, without.order, without.keys, without.tokens) == (None, "contiguous", None, 21)
    longer = minimize(case, lambda case: case.same_bits is not None and case.tokens > 20)
    assert (longer.same_bits, longer.order, longer.keys, longer.tokens) == (64, "chunks", None, 21)


@pytest.mark.parametrize(
    "fails, least",
    [
        (lambda documents, n: documents[0] < n // 4, (1, 7)),  # it ends within the first shard
        (lambda documents, n: 1 in documents[1:-1], (1, 1, 2)),
        (lambda documents, n: len(documents) > 2, (1, 1, 2)),
        (lambda documents, n: documents[-1] == 1 or documents == (1, 1, 2), (3, 1)),
        (lambda documents, n: max(documents) > 4, (8,)),
    ],
)
def test_documents_shrink_where_ranks_divide_the_tokens(fails: Any, least: tuple[int, ...]) -> None:
    case = plain(4, tokens=44, pattern=Pattern.dense(documents=(5, 1, 13, 8, 3, 1, 12, 1)))
    shrunk = minimize(
        case, lambda x: x.tokens % 4 == 0 and x.pattern.documents is not None and fails(x.pattern.documents, x.tokens)
    )
    assert shrunk.pattern.documents == least


@pytest.mark.parametrize(
    "fails, tokens, left",
    [
        (lambda slices: True, 1, [Slice(high=0)]),
        (lambda slices: len(slices) > 1, 2, [Slice(k1=1), Slice(low=1)]),
        (lambda slices: any((one.low or 0) > 0 for one in slices), 2, [Slice(low=1)]),
        (lambda slices: any(one.q1 is not None and one.q1 - one.q0 >= 3 for one in slices), 3, [Slice(q1=3)]),
    ],
)
def test_slices_shrink_with_their_sequence(fails: Any, tokens: int, left: list[Slice]) -> None:
    slices = Slice(high=0), Slice(4, 19, 4, 19, low=1), Slice(30, 44, 30, 41, 1, 7)
    case = plain(4, tokens=44, pattern=Pattern((Branch(slices=slices),)), keys=Keys(41))
    shrunk = minimize(case, lambda x: x.pattern.has_slices and fails(x.pattern.branches[0].slices))
    assert (shrunk.tokens, shrunk.keys, list(shrunk.pattern.branches[0].slices or ())) == (tokens, None, left)


def test_cut_shrinking_is_reported(ranks: GlooBackend) -> None:
    search = search_with(ranks, lambda case: WrongResult("values: out is wrong") if case.tokens > 4 else None)
    search.budget = 0.0
    (found,) = search.explore(40, 1)
    assert "shrinking was cut short" in found.failure.__notes__[-1]


@pytest.mark.parametrize("exchange", ("ring+direct", "auto"))
def test_an_exchange_without_a_number_gets_its_number(exchange: str) -> None:
    given = replace(CROWDED, exchange=exchange, hosts=1 if exchange == "auto" else 2)
    least = minimize(given, lambda case: with_number(case).exchange == with_number(given).exchange)
    assert with_number(given).exchange == "direct" and least == replace(LEAST, exchange="direct")


@seeded(1)
@settings(max_examples=300, database=None, deadline=None)
@given(cases(3))
def test_smaller_cases_approach_the_least(case: Case) -> None:
    """Else shrinking would go round in a circle."""
    assert replace(minimize(case, lambda simpler: True), dtype="float32") == LEAST
    assert all(simpler != case and simpler.to_json() != case.to_json() for simpler in simpler_cases(case))


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


def test_searches_raise_faults_of_the_machinery(ranks: GlooBackend) -> None:
    search = search_with(ranks, lambda case: None, draw=lambda world: cases(world).filter(lambda case: False))
    assert search.explore(100, 1) == [] and search.examples == 0
    with pytest.raises(ToolError):
        search_with(ranks, lambda case: KeyError("not the ranks' fault")).explore(40, 1)


EARLY = (
    r"in the simulation: rank (\d) reads the receive buffer of 'keys and values \d' "
    r"\(\d+ bytes of float32\) from rank (\d) before that message was waited for"
)
hasty = preparation(by_name("keys-waited-for-after-use"))
stuck = preparation(by_name("keys-read-before-they-landed"))
HANG = RankHang("no answer")


@pytest.mark.parametrize(
    "prepare, case, failure, said",
    [
        *((hasty, plain(3, tokens=9, exchange=exchange), WRONG, EARLY) for exchange in ("ring", "direct", "gather")),
        (stuck, plain(2), HANG, "in the simulation, broken contract: .*never waited for batch 0.*"),
        (plant_receive_first, plain(3, tokens=6), HANG, "in the simulation, rank hang: deadlock of 3 ranks: rank .*"),
        (None, plain(3, tokens=9), WRONG, None),
        (plant_wrong_result, plain(3, tokens=9), WRONG, None),  # whatever comes when
    ],
)
def test_simulation_names_causes(prepare: Any, case: Case, failure: Any, said: str | None) -> None:
    with closing(SimBackend(prepare=prepare)) as simulation:
        cause = cause_in(simulation, EXAMPLES, case, failure)
    assert cause is None if said is None else re.fullmatch(said, str(cause), re.DOTALL), cause


def test_causes_on_gloo_are_reported(ranks: GlooBackend, tmp_path: Path) -> None:
    """Ranks are named as in the world, not as in the group."""

    def wrong_on_gloo(backend: Any, case: Case) -> dict[str, float]:
        if backend is ranks:  # as a race that is always lost there
            raise WrongResult("values: out is 3e-41")
        return check_case(backend, case)

    drawn = st.integers(4, 12).map(lambda tokens: plain(3, tokens=tokens, group=(0, 2)))
    experiment = replace(EXAMPLES, check=wrong_on_gloo, draw=lambda world: drawn, validate=None)
    with closing(SimBackend(prepare=hasty)) as simulation:
        search = Search(experiment, ranks, Report(recording()), 3, shrink_backend=simulation)
        (found,) = search.explore(5, 1)
        told = runner.save(found, search, tmp_path)
    assert (told.kind, told.backend) == ("wrong result", "gloo")
    first, second = told.message.splitlines()
    early = re.fullmatch(EARLY, second)
    assert first == "values: out is 3e-41" and early is not None and {early[1], early[2]} == {"0", "2"}
