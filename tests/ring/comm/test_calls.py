"""Calls on a group that cannot be confused, on real ranks and in the simulation: what differs is told on all ranks, no
number is wrong, and the group works on.

A scenario is what each of three ranks does on a group, rank 1 another thing than the others. All end with a call that
all ranks make, which shows whether the group can still be used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference import Pattern, attention, gradients
from ring import Layout, ring_attention
from ring.comm.calls import Calls
from ring.comm.group import transport_over
from ring.comm.transport import SoloTransport
from tests.support.ranks import Ranks
from verification.run.programs import SecondThread, in_second_thread
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

WORLD, TOKENS, PATTERN = 3, 11, Pattern.longnet((6, None), (1, 2), 2, causal=True)
EXACT = 1e-12  # fp64, of results of the order of 1


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_calls_are_numbered_and_named() -> None:
    calls = Calls()
    first, second = calls.begin(None), calls.begin("layer 3")
    assert (first.forward, second.forward) == ("the forward of call 1", "the forward of call 2 ('layer 3')")
    assert second.backward == second.backward == "the backward of call 2 ('layer 3')", "to ask does not count"
    second.backwards += 1
    assert second.backward == "backward 2 of call 2 ('layer 3')" and first.backward == "the backward of call 1"


def test_numbers_catch_up_and_never_fall_back() -> None:
    calls = Calls()
    calls.begin(None)
    calls.catch_up(7)
    calls.catch_up(3)
    assert calls.number == 7 and calls.begin(None).number == 8
    assert [calls.next_question(), calls.next_question()] == [1, 2] and calls.number == 8, "counted apart from calls"


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


# --- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """errors: what was raised, in order. number: of the latest call on the group at the end. worst: the greatest error
    of all that came out.
    """

    errors: tuple[str, ...]
    number: int
    worst: float


class Caller:
    """A rank that makes calls, each on other numbers, and compares what they give with the oracle."""

    def __init__(self, group: Any, world_size: int) -> None:
        self.group, self.transport = group, transport_over(group, world_size)
        self.rank, self.layout = self.transport.rank, Layout.zigzag(TOKENS, world_size)
        self.errors: list[str] = []
        self.worst = 0.0

    def forward(self, seed: int, **options: Any) -> Flight | None:
        """None if it is refused."""
        begun: list[Flight] = []
        self.attempt(lambda: begun.append(Flight(self, seed, options)))
        return begun[0] if begun else None

    def backward(self, flight: Flight | None) -> None:
        assert flight is not None
        self.attempt(flight.backward)

    def attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (ValueError, RuntimeError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def compare(self, mine: Tensor, exact: Tensor) -> None:
        self.worst = max(self.worst, float((mine.detach() - self.layout.shard(exact, self.rank)).abs().max()))


class Flight:
    """One call."""

    def __init__(self, caller: Caller, seed: int, options: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.whole = [torch.randn(1, TOKENS, 2, 4, dtype=torch.float64, generator=draw) for _ in "qkvd"]
        self.caller, layout = caller, caller.layout
        self.leaves = [layout.shard(x, caller.rank).requires_grad_() for x in self.whole[:3]]
        q, k, v = self.leaves
        out = ring_attention(q, k, v, PATTERN, layout, group=caller.group, **options)
        assert isinstance(out, Tensor)
        self.out = out
        whole_q, whole_k, whole_v, _ = self.whole
        caller.compare(out, attention(whole_q, whole_k, whole_v, PATTERN)[0])

    def backward(self) -> None:
        q, k, v, dout = self.whole
        mine = self.caller.layout.shard(dout, self.caller.rank)
        grads = torch.autograd.grad(self.out, self.leaves, mine, retain_graph=True)
        for x, y in zip(grads, gradients(q, k, v, PATTERN, dout), strict=True):
            self.caller.compare(x, y)


Scenario = Callable[[Caller], None]
Run = Callable[[Scenario], list[Outcome]]


def take_part(group: Any, world_size: int, scenario: Scenario) -> Outcome:
    caller = Caller(group, world_size)
    scenario(caller)
    Flight(caller, 99, {"name": "the last"}).backward()
    return Outcome(tuple(caller.errors), caller.transport.calls.number, caller.worst)


def _on_a_new_group(scenario: Scenario) -> Outcome:
    """On a group of its own, whose calls begin with number 1."""
    group = dist.new_group()
    outcome = take_part(group, dist.get_world_size(), scenario)
    dist.destroy_process_group(group)
    return outcome


@pytest.fixture(params=("gloo", "sim"))
def run(request: pytest.FixtureRequest, ranks: Ranks) -> Run:
    """A scenario on three ranks."""
    if request.param == "sim":
        return lambda scenario: Simulation(WORLD, 0).run(lambda transport: take_part(transport, WORLD, scenario))
    return lambda scenario: ranks(WORLD).run(_on_a_new_group, scenario)


# --- what differs -----------------------------------------------------------------------------------------------------


def forwards_swapped(caller: Caller, names: bool = True) -> None:
    for number in (2, 1) if caller.rank == 1 else (1, 2):
        caller.forward(number, name=f"layer {number}" if names else None)


def backwards_swapped(caller: Caller) -> None:
    flights = [caller.forward(number, name=f"layer {number}") for number in (1, 2)]
    for flight in flights if caller.rank == 1 else flights[::-1]:
        caller.backward(flight)


def backward_left_out(caller: Caller, tried_again: bool = False) -> None:
    """tried_again: after the ranks were found in different calls, all of them go through the backward, twice."""
    first = caller.forward(1)
    if caller.rank == 1:
        caller.forward(2)
    else:
        caller.backward(first)
    for _ in range(2 * tried_again):
        caller.backward(first)


def backward_left_out_at_the_end(caller: Caller) -> None:
    """The call that all make at the end is the one that is met: here it is tried, and refused."""
    first = caller.forward(1)
    if caller.rank == 1:
        caller.forward(99, name="the last")
    else:
        caller.backward(first)


def one_backward_twice(caller: Caller) -> None:
    first = caller.forward(1)
    caller.backward(first)
    if caller.rank == 1:
        caller.backward(first)
    else:
        caller.forward(2)


def a_name_that_is_none(caller: Caller) -> None:
    caller.forward(1, name=3 if caller.rank == 1 else "3")


def interleaved(caller: Caller) -> None:
    """The same order on all ranks: as pipelines have it, with a graph that is gone through twice."""
    first, second = caller.forward(1), caller.forward(2, name="second")
    caller.backward(second)
    third = caller.forward(3)
    for flight in (first, third, first):
        caller.backward(flight)


def threads_that_end(caller: Caller) -> None:
    """One thread after the other, each for a call and its backward."""

    def call(number: int) -> None:
        caller.backward(caller.forward(number))

    for number in (1, 2, 3):
        in_second_thread(partial(call, number))


def recomputed(caller: Caller, reentrant: bool, in_thread: bool) -> None:
    """Forwards in the thread that calls, all of them again while autograd goes back, perhaps for another thread."""
    layout, draw = caller.layout, torch.Generator().manual_seed(1)
    q, k, v, dout = torch.randn(4, 1, TOKENS, 2, 4, dtype=torch.float64, generator=draw)
    leaves = [layout.shard(x, caller.rank).requires_grad_() for x in (q, k, v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_attention(2 * q, k, v, PATTERN, layout, group=caller.group)
        assert isinstance(out, Tensor)
        return out

    out = checkpoint(attend, *leaves, use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    back = partial(out.backward, layout.shard(dout, caller.rank))
    in_second_thread(back) if in_thread else back()
    dq, dk, dv = gradients(2 * q, k, v, PATTERN, dout)
    for leaf, exact in zip(leaves, (2 * dq, dk, dv), strict=True):
        assert leaf.grad is not None
        caller.compare(leaf.grad, exact)


ORDER = "ValueError: calls on a group must come in the same order on every rank: rank 0 is in"
OUTCOMES: list[tuple[Scenario, int, list[str]]] = [  # the scenario, the number of the last call, all errors
    (forwards_swapped, 3,
     [f"{ORDER} the forward of call 1 ('layer 1'), rank 1 in the forward of call 1 ('layer 2')",
      f"{ORDER} the forward of call 2 ('layer 2'), rank 1 in the forward of call 2 ('layer 1')"]),
    (backwards_swapped, 3,
     [f"{ORDER} the backward of call 2 ('layer 2'), rank 1 in the backward of call 1 ('layer 1')",
      f"{ORDER} the backward of call 1 ('layer 1'), rank 1 in the backward of call 2 ('layer 2')"]),
    (backward_left_out, 3, [f"{ORDER} the backward of call 1, rank 1 in the forward of call 2"]),
    (partial(backward_left_out, tried_again=True), 3,
     [f"{ORDER} the backward of call 1, rank 1 in the forward of call 2"]),
    (backward_left_out_at_the_end, 3,
     [f"{ORDER} the backward of call 1, rank 1 in the forward of call 2 ('the last')"]),
    (one_backward_twice, 3, [f"{ORDER} the forward of call 2, rank 1 in backward 2 of call 1"]),
    (a_name_that_is_none, 2, ["ValueError: rank 1: name must be None or a string, got <class 'int'>"]),
    # The same on all ranks, and so right.
    (interleaved, 4, []),
    (threads_that_end, 4, []),
    *((partial(recomputed, reentrant=a, in_thread=b), 3, []) for a in (False, True) for b in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize(("scenario", "number", "errors"), OUTCOMES)
def test_what_differs_is_told_on_all_ranks(run: Run, scenario: Scenario, number: int, errors: list[str]) -> None:
    """And nothing that came out is wrong, and the last call is counted alike."""
    for outcome in run(scenario):
        assert list(outcome.errors) == errors
        assert outcome.number == number and outcome.worst < EXACT


def test_alike_calls_without_names_are_not_told_apart(run: Run) -> None:
    """Why there are names: this is as wrong as can be, and nobody can know."""
    outcomes = run(partial(forwards_swapped, names=False))
    assert all(outcome.errors == () for outcome in outcomes)
    assert max(outcome.worst for outcome in outcomes) > 0.1


# --- threads ----------------------------------------------------------------------------------------------------------


def a_second_thread(caller: Caller) -> None:
    """While the first one waits; then the backward of what it had under way."""
    first = caller.forward(1)
    if caller.rank == min(1, caller.transport.world_size - 1):
        in_second_thread(lambda: caller.forward(2))
    else:
        caller.forward(2)
    caller.backward(first)


def test_a_second_thread_is_refused_on_all_ranks(run: Run) -> None:
    """And so is the backward of what was under way: on another rank the other thread may have been the first."""
    for outcome in run(a_second_thread):
        refused, backward = outcome.errors
        assert refused.startswith(
            "ValueError: rank 1: calls on a group must come from one thread: got call 2 from 'second thread', and "
            "call 1 from '"
        )
        assert refused.endswith("which still runs; allowed is a group of its own for each thread")
        assert backward.startswith("ValueError: rank 1: call 1 has no backward any more, since after it calls on")
        assert outcome.worst < EXACT


def test_one_rank_may_call_from_any_thread() -> None:
    """Nobody else is there to be confused."""
    outcome = take_part(SoloTransport(), 1, a_second_thread)
    assert outcome.errors == () and outcome.worst < EXACT


def racing_threads(caller: Caller) -> None:
    """The own thread first on rank 0, a second one on rank 1: what each calls first would meet the other's."""
    begun = threading.Event()
    other = Caller(caller.group, caller.transport.world_size)

    def second() -> None:
        if caller.rank != 1:
            begun.wait()
        flight = other.forward(2)
        if flight is not None:
            other.backward(flight)

    thread = SecondThread(second)
    thread.start()
    if caller.rank == 1:
        thread.result()
    flight = caller.forward(1)
    begun.set()
    thread.result()
    caller.errors += other.errors
    caller.worst = max(caller.worst, other.worst)
    if flight is not None:
        caller.backward(flight)


def test_racing_threads_never_give_wrong_numbers(run: Run, request: pytest.FixtureRequest) -> None:
    """In a simulation no rank is the main thread: nothing shows before the second call."""
    for outcome in run(racing_threads):
        assert any("calls on a group must come from one thread" in error for error in outcome.errors)
        assert outcome.worst < EXACT or "sim" in request.node.name
        if "sim" in request.node.name:
            assert any("call 1 has no backward any more" in error for error in outcome.errors)
        else:
            said = (
                "calling thread must be the same on every rank: rank 0 has the main one, rank 1 another than the main"
            )
            assert len(outcome.errors) == 2 and any(said in error for error in outcome.errors)
