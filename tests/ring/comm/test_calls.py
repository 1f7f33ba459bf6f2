"""Calls on a group that cannot be confused, on real ranks and in the simulation: what differs is told on all ranks, no
number is wrong, and the group works on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ring.comm.calls import Calls
from ring.comm.transport import SoloTransport
from tests.support import call_tasks
from tests.support.call_tasks import EXACT, Outcome, Scenario, on_real_ranks, simulated, take_part
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

WORLD = 3
Run = Callable[[Scenario], list[Outcome]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(WORLD, preload=("torch", "torch._dynamo", call_tasks.__name__)) as ranks:
        yield ranks


@pytest.fixture(params=("gloo", "sim"))
def run(request: pytest.FixtureRequest) -> Run:
    """A scenario on three ranks."""
    if request.param == "sim":
        return lambda scenario: simulated(scenario, WORLD)
    pool: Pool = request.getfixturevalue("pool")
    return lambda scenario: pool.run(on_real_ranks, scenario)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_calls_are_numbered_and_named() -> None:
    calls = Calls()
    first, second = calls.begin(None), calls.begin("layer 3")
    assert (first.forward, second.forward) == ("the forward of call 1", "the forward of call 2 ('layer 3')")
    assert second.backward == second.backward == "the backward of call 2 ('layer 3')", "to ask does not count"
    second.backwards += 1
    assert second.backward == "backward 2 of call 2 ('layer 3')"
    assert first.backward == "the backward of call 1"


def test_numbers_catch_up_and_never_fall_back() -> None:
    calls = Calls()
    calls.begin(None)
    calls.catch_up(7)
    calls.catch_up(3)
    assert calls.number == 7 and calls.begin(None).number == 8


def test_questions_are_numbered_apart_from_calls() -> None:
    calls = Calls()
    assert [calls.next_question(), calls.next_question()] == [1, 2] and calls.number == 0


# --- what differs -----------------------------------------------------------------------------------------------------

ORDER = "ValueError: calls on a group must come in the same order on every rank: rank 0 is in"
DIFFERENT: list[tuple[Scenario, int, list[str]]] = [  # the scenario, the number of the last call, all errors
    (
        call_tasks.forwards_swapped,
        3,
        [
            f"{ORDER} the forward of call 1 ('layer 1'), rank 1 in the forward of call 1 ('layer 2')",
            f"{ORDER} the forward of call 2 ('layer 2'), rank 1 in the forward of call 2 ('layer 1')",
        ],
    ),
    (
        call_tasks.backwards_swapped,
        3,
        [
            f"{ORDER} the backward of call 2 ('layer 2'), rank 1 in the backward of call 1 ('layer 1')",
            f"{ORDER} the backward of call 1 ('layer 1'), rank 1 in the backward of call 2 ('layer 2')",
        ],
    ),
    (
        call_tasks.backward_left_out,
        3,
        [f"{ORDER} the backward of call 1, rank 1 in the forward of call 2"],
    ),
    (
        call_tasks.backward_left_out_at_the_end,
        3,
        [f"{ORDER} the backward of call 1, rank 1 in the forward of call 2 ('the last')"],
    ),
    (
        call_tasks.backward_tried_again,
        3,
        [f"{ORDER} the backward of call 1, rank 1 in the forward of call 2"],
    ),
    (
        call_tasks.one_backward_twice,
        3,
        [f"{ORDER} the forward of call 2, rank 1 in backward 2 of call 1"],
    ),
    (
        call_tasks.a_name_that_is_none,
        2,
        ["ValueError: rank 1: name must be None or a string, got <class 'int'>"],
    ),
]


@pytest.mark.parametrize(
    ("scenario", "number", "errors"), DIFFERENT, ids=[scenario.__name__ for scenario, *_ in DIFFERENT]
)
def test_what_differs_is_told_on_all_ranks(run: Run, scenario: Scenario, number: int, errors: list[str]) -> None:
    """And nothing that came out is wrong, and the last call is counted alike."""
    for outcome in run(scenario):
        assert list(outcome.errors) == errors
        assert outcome.number == number and outcome.worst < EXACT


def test_any_order_is_right_if_it_is_the_same_on_all_ranks(run: Run) -> None:
    for outcome in run(call_tasks.interleaved):
        assert outcome.errors == () and outcome.number == 4 and outcome.worst < EXACT


def test_alike_calls_without_names_are_not_told_apart(run: Run) -> None:
    """Why there are names: this is as wrong as can be, and nobody can know."""
    outcomes = run(call_tasks.alike_forwards_swapped_without_names)
    assert all(outcome.errors == () for outcome in outcomes)
    assert max(outcome.worst for outcome in outcomes) > 0.1


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_on_all_ranks(run: Run) -> None:
    """And so is the backward of what was under way: on another rank the other thread may have been the first."""
    for outcome in run(call_tasks.a_second_thread):
        refused, backward = outcome.errors
        assert refused.startswith(
            "ValueError: rank 1: calls on a group must come from one thread: got call 2 from 'second thread', and "
            "call 1 from '"
        )
        assert refused.endswith("which still runs; allowed is a group of its own for each thread")
        assert backward.startswith("ValueError: rank 1: call 1 has no backward any more, since after it calls on")
        assert outcome.worst < EXACT


def test_threads_that_have_ended_make_room(run: Run) -> None:
    for outcome in run(call_tasks.threads_that_end):
        assert outcome.errors == () and outcome.number == 4 and outcome.worst < EXACT


@pytest.mark.parametrize("in_thread", (False, True))
@pytest.mark.parametrize("reentrant", (False, True))
def test_what_checkpointing_computes_again_may_come_from_any_thread(run: Run, reentrant: bool, in_thread: bool) -> None:
    for outcome in run(partial(call_tasks.recomputed, reentrant=reentrant, in_thread=in_thread)):
        assert outcome.errors == () and outcome.number == 3 and outcome.worst < EXACT


def test_racing_threads_never_give_wrong_numbers(pool: Pool) -> None:
    for outcome in pool.run(on_real_ranks, call_tasks.racing_threads):
        said = "ValueError: calling thread must be the same on every rank: rank 0 has the main one, rank 1 another"
        assert outcome.errors[0].startswith(said)
        assert "calls on a group must come from one thread" in outcome.errors[1]
        assert len(outcome.errors) == 2 and outcome.worst < EXACT


def test_racing_threads_that_look_alike_have_no_backward() -> None:
    """In a simulation no rank is the main thread: nothing shows before the second call."""
    for outcome in simulated(call_tasks.racing_threads, WORLD):
        assert any("calls on a group must come from one thread" in error for error in outcome.errors)
        assert any("call 1 has no backward any more" in error for error in outcome.errors)


def test_another_thread_waits_for_its_turn() -> None:
    calls, order = Calls(), []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with calls.turn():
            inside.set()
            leave.wait()
            order.append("first")

    def second() -> None:
        with calls.turn(), calls.turn():
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "second"]


def test_one_rank_may_call_from_any_thread() -> None:
    """Nobody else is there to be confused."""
    outcome = take_part(SoloTransport(), 1, call_tasks.a_second_thread)
    assert outcome.errors == () and outcome.worst < EXACT
