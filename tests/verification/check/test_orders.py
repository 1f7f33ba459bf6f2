"""The law of calls in flight: what it lets ranks do, what it holds against them, and which records it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings

from tests.support.plain_case import plain
from tests.support.planted_orders import (
    compares_no_backwards,
    keeps_one_output,
    lets_any_thread_call,
    lets_threads_call_at_a_time,
    never_catches_up,
    says_less,
)
from verification.check.laws.orders import CALLS_ARE_NOT_CONFUSED, MISTAKES, Deviation, Flights, check_orders
from verification.failures import VerificationFailure
from verification.run.backends import GlooBackend, SimBackend
from verification.run.programs import FlightStep

pytestmark = pytest.mark.ranks

BACKENDS = (SimBackend, GlooBackend)
How = dict[str, Any]


def how(deviation: list[Any] | None = None, **changes: Any) -> How:
    """Two calls in flight on all ranks, the second one's backward first, as pipelines have it."""
    order = [["forward", 0], ["forward", 1], ["backward", 1], ["backward", 0]]
    made: How = {"members": None, "groups": [0, 0], "names": [None, "b"], "order": order, "deviation": deviation}
    return made | changes


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    one = request.param(30.0)
    one.start(3)
    yield one
    one.close()


DEVIATIONS = [
    None,
    *([kind, culprit, at] for kind, at in zip(MISTAKES, (2, 3, 1, 2), strict=True) for culprit in (0, 2)),
]


@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize("members", (None, [0, 2]))
def test_the_ring_keeps_the_law(backend: Any, deviation: list[Any] | None, members: list[int] | None) -> None:
    groups = [0, 0] if members is None else [1, 1]
    made = how(deviation, members=members, groups=groups)
    CALLS_ARE_NOT_CONFUSED.premise(plain(3), made)
    assert check_orders(backend, plain(3, dtype="float64", lse="differentiated"), made) == 0.0


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("prepare", "deviation", "said"),
    [
        (keeps_one_output, None, "other results than by themselves: out of call 0"),
        (compares_no_backwards, ["skips", 1, 2], ""),  # messages of two calls meet, and then anything may be
        (never_catches_up, ["skips", 1, 3], "rank 0 is in the forward of call 6, rank 1 in the forward of call 7"),
        (says_less, ["skips", 1, 2], "the error does not name 'the backward of call"),
        (
            lets_any_thread_call,
            ["thread", 1, 1],
            "index 0 raised None after 2 steps|error does not name .calls on a group",
        ),
        (lets_threads_call_at_a_time, ["siege", 1, 1], "a second thread's call began while another one was under way"),
    ],
)
def test_what_breaks_the_law_is_found(
    kind: Any, prepare: Callable[[], None], deviation: list[Any] | None, said: str
) -> None:
    backend = kind(4.0, prepare)
    backend.start(2)
    try:
        with pytest.raises(VerificationFailure) as caught:
            check_orders(backend, plain(2, exchange="direct"), how(deviation))
        assert re.search(said, str(caught.value))
    finally:
        backend.close()


# --- on paper ---------------------------------------------------------------------------------------------------------

ORDER = tuple(FlightStep(*step) for step in how()["order"])
PLAIN = Flights(3, None, (0, 0), (None, "b"), ORDER)
LAST = FlightStep("forward", 2)


@pytest.mark.parametrize(
    ("deviation", "culprit", "others"),
    [
        (Deviation("skips", 1, 2), [*ORDER[:2], ORDER[3]], ORDER[:3]),
        (Deviation("skips", 1, 3), [*ORDER[:3], LAST], ORDER),
        (Deviation("repeats", 1, 2), [*ORDER[:3], ORDER[2]], ORDER),
        (Deviation("repeats", 1, 3), [*ORDER, ORDER[3]], [*ORDER, LAST]),
        (Deviation("thread", 1, 1), [ORDER[0], FlightStep("forward", 1, "second thread")], ORDER[:2]),
        (Deviation("siege", 1, 0), [FlightStep("forward", 0, "besieged")], [ORDER[0], LAST]),
    ],
)
def test_a_program_ends_where_a_deviation_shows(deviation: Deviation, culprit: Any, others: Any) -> None:
    assert PLAIN.programs(deviation) == [list(others), list(culprit), list(others)]


def test_only_members_take_part_in_a_group() -> None:
    flights = Flights(3, (0, 2), (1, 0), (None, None), ORDER)
    of_all = [step for step in ORDER if step.call == 1]
    assert flights.programs(None) == [list(ORDER), of_all, list(ORDER)]
    # Rank 2 leaves out the backward of call 0, and all that follows: rank 1 knows nothing of it.
    assert flights.programs(Deviation("skips", 2, 3)) == [list(ORDER), of_all, [*ORDER[:3], FlightStep("forward", 3)]]


def test_what_nobody_can_notice_is_no_deviation() -> None:
    unnamed = PLAIN._replace(names=(None, None))
    assert set(PLAIN.deviations()) - set(unnamed.deviations()) == {("skips", 0)}
    assert ("skips", 1) not in PLAIN.deviations(), "a call's backward cannot come before its forward"
    twice = PLAIN._replace(order=(ORDER[0], ORDER[3], ORDER[3]))
    assert [at for kind, at in twice.deviations() if kind in ("skips", "repeats")] == [2, 2]
    alone = Flights(3, (1,), (1, 1), (None, "b"), ORDER)
    assert alone.deviations() == []


def test_all_that_may_deviate_is_drawn() -> None:
    seen: set[tuple[str | None, bool]] = set()

    @seed(1)
    @settings(max_examples=300, database=None, deadline=None, phases=(Phase.generate,))
    @given(CALLS_ARE_NOT_CONFUSED.draw(4))
    def collect(subject: tuple[Any, How]) -> None:
        case, made = subject
        CALLS_ARE_NOT_CONFUSED.premise(case, made)
        deviation = made["deviation"]
        seen.add((None if deviation is None else deviation[0], made["members"] is not None))

    collect()
    assert seen == {(kind, second) for kind in (None, *MISTAKES) for second in (False, True)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"members": [0, 1, 2]}, "members of how is [0, 1, 2]; it must be some ranks of a Case"),
        ({"members": [2, 0]}, "members of how is [2, 0]"),
        ({"members": [0, 3]}, "members of how is [0, 3]"),
        ({"groups": [0, 1]}, "groups of how is [0, 1]; it must be 1 to 4 numbers up to 0"),
        ({"groups": [0] * 5, "names": [None] * 5}, "groups of how is [0, 0, 0, 0, 0]"),
        ({"names": [None]}, "names of how is [None]; it must have a name or null for each call"),
        ({"names": [None, 3]}, "names of how is [None, 3]"),
        ({"order": [["backward", 0], ["forward", 0]]}, "a call must have one forward, before its backwards"),
        ({"order": [["forward", 0], ["forward", 0]]}, "a call must have one forward, before its backwards"),
        ({"order": [["sideways", 0]]}, "a direction of how is 'sideways'"),
        ({"order": [["forward", 2]]}, "a call of how is 2"),
        ({"order": "forward"}, "order of how is 'forward'"),
        ({"deviation": ["skips", 0, 1]}, "deviation of how is ['skips', 0, 1]; it must be null or one of"),
        ({"deviation": ["skips", 3, 2]}, "deviation of how is ['skips', 3, 2]"),
        ({"more": 1}, "how must be an object with the fields"),
    ],
)
def test_a_record_that_is_never_drawn_is_refused(changes: How, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        CALLS_ARE_NOT_CONFUSED.premise(plain(3), how(**changes))
    assert said in str(caught.value)


def test_a_second_group_is_one_of_all_ranks() -> None:
    with pytest.raises(ValueError, match="must be some ranks of a Case whose group is null"):
        CALLS_ARE_NOT_CONFUSED.premise(plain(4, group=(0, 1, 3)), how(members=[0], groups=[0, 1]))
