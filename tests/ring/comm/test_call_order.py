"""Calls on a group that cannot be confused, on real ranks and in the simulation: what differs is told on all ranks, and
the group works on. Orders of forwards and backwards are in the law "calls are not confused", on drawn cases.

A scenario is what each of three ranks does on a group, rank 1 another thing than the others. Then all call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference import Pattern, attention, gradients
from ring import Layout, ring_attention
from ring.comm.call_order import Calls
from ring.comm.group import transport_over
from ring.comm.transport import SoloTransport
from tests.support.ranks import Ranks
from verification.run.in_flight_calls import in_second_thread
from verification.run.simulation.simulation import Simulation

pytestmark = pytest.mark.ranks

WORLD, TOKENS, PATTERN = 3, 11, Pattern.longnet((6, None), (1, 2), 2, causal=True)
T = TypeVar("T")
EXACT = 1e-12  # fp64, of results of the order of 1


def test_another_thread_waits_for_its_turn() -> None:
    calls, order = Calls(), []

    def other() -> None:
        with calls.lock():
            order.append("other")

    thread = threading.Thread(target=other)
    with calls.lock(), calls.lock():
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


class Caller:
    """A rank that makes calls, each on other numbers, and compares what they give with the oracle.

    errors: what was raised, in order. worst: the greatest error of all that came out.
    """

    def __init__(self, group: Any, world_size: int) -> None:
        self.group, self.transport = group, transport_over(group, world_size)
        self.rank, self.layout = self.transport.rank, Layout.zigzag(TOKENS, world_size)
        self.errors: list[str] = []
        self.worst = 0.0

    def forward(self, seed: int, name: str | None = None) -> Flight | None:
        """None if it is refused."""
        return self.attempt(lambda: Flight(self, seed, name))

    def backward(self, flight: Flight | None) -> None:
        assert flight is not None
        self.attempt(flight.backward)

    def attempt(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (ValueError, RuntimeError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return None

    def compare(self, mine: Tensor, exact: Tensor) -> None:
        self.worst = max(self.worst, float((mine.detach() - self.layout.shard(exact, self.rank)).abs().max()))


class Flight:
    """One call; around: what it is wrapped in."""

    def __init__(self, caller: Caller, seed: int, name: str | None = None, around: Any = None) -> None:
        draw = torch.Generator().manual_seed(seed)
        q, k, v, dout = self.whole = torch.randn(4, 1, TOKENS, 2, 4, dtype=torch.float64, generator=draw)
        self.caller, layout = caller, caller.layout
        self.leaves = [layout.shard(x, caller.rank).requires_grad_() for x in (q, k, v)]
        self.dout = layout.shard(dout, caller.rank)
        call: Any = partial(ring_attention, pattern=PATTERN, layout=layout, group=caller.group, name=name)
        self.out: Tensor = around(call, *self.leaves) if around else call(*self.leaves)
        caller.compare(self.out, attention(q, k, v, PATTERN)[0])

    def backward(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.out.backward(self.dout, retain_graph=True)
        q, k, v, dout = self.whole
        for leaf, exact in zip(self.leaves, gradients(q, k, v, PATTERN, dout), strict=True):
            assert leaf.grad is not None
            self.caller.compare(leaf.grad, exact)


Scenario = Callable[[Caller], None]
Outcome = tuple[list[str], int, float]  # errors, number of the latest call on the group at the end, worst
Run = Callable[[Scenario], list[Outcome]]


def take_part(group: Any, world_size: int, scenario: Scenario) -> Outcome:
    caller = Caller(group, world_size)
    scenario(caller)
    Flight(caller, 99, "the last").backward()
    return caller.errors, caller.transport.calls.number, caller.worst


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


def forwards_swapped(caller: Caller) -> None:
    for number in (2, 1) if caller.rank == 1 else (1, 2):
        caller.forward(number, f"layer {number}")


def threads_that_end(caller: Caller) -> None:
    """One thread after the other, each for a call and its backward."""
    for number in (1, 2, 3):
        in_second_thread(partial(lambda seed: caller.backward(caller.forward(seed)), number))


def recomputed(caller: Caller, reentrant: bool) -> None:
    """A forward in the thread that calls, and again while autograd goes back for another thread."""
    in_second_thread(Flight(caller, 1, around=partial(checkpoint, use_reentrant=reentrant)).backward)


ORDER = "ValueError: calls on a group must come in the same order on every rank: rank 0 is in"
OUTCOMES: list[tuple[Scenario, int, list[str]]] = [  # the scenario, the number of the last call, all errors
    (forwards_swapped, 3,
     [f"{ORDER} the forward of call 1 ('layer 1'), rank 1 in the forward of call 1 ('layer 2')",
      f"{ORDER} the forward of call 2 ('layer 2'), rank 1 in the forward of call 2 ('layer 1')"]),
    (threads_that_end, 4, []),
    *((partial(recomputed, reentrant=reentrant), 3, []) for reentrant in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize(("scenario", "number", "errors"), OUTCOMES)
def test_differing_calls_raise_on_all_ranks(run: Run, scenario: Scenario, number: int, errors: list[str]) -> None:
    """And nothing that came out is wrong, and the last call is counted alike."""
    for *told, worst in run(scenario):
        assert told == [errors, number] and worst < EXACT


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
    for (refused, backward), _, worst in run(a_second_thread):
        said = "rank 1: calls on a group must come from one thread: got call 2 from 'second thread', and call 1 from '"
        assert said in refused and refused.endswith("still runs; give each thread its own group")
        assert backward.startswith("ValueError: rank 1: call 1 has no backward any more, since after it calls on")
        assert worst < EXACT


def test_one_rank_may_call_from_any_thread() -> None:
    errors, _, worst = take_part(SoloTransport(), 1, a_second_thread)
    assert not errors and worst < EXACT
