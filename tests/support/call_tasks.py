"""What ranks do with several calls on one group: functions of the group, for a simulation and for real ranks alike.

Each gives an `Outcome`. All end with a call that all ranks make, which shows whether the group can still be used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference import Pattern, attention, gradients
from ring import Layout, Transport, ring_attention
from ring.comm.group import transport_over
from verification.run.programs import SecondThread, in_second_thread
from verification.run.simulation.simulation import Simulation

Group = Any  # as ring_attention takes it
PATTERN = Pattern.longnet((6, None), (1, 2), 2, causal=True)
TOKENS = 11
EXACT = 1e-12  # fp64, of results of the order of 1


@dataclass(frozen=True)
class Outcome:
    """errors: what was raised, in order. number: of the latest call on the group at the end. worst: the greatest error
    of all that came out.
    """

    errors: tuple[str, ...]
    number: int
    worst: float


class Caller:
    """A rank that makes calls, each on other numbers, and keeps account of them."""

    def __init__(self, group: Group, world_size: int) -> None:
        self.group, self.transport = group, transport_over(group, world_size)
        self.rank, self.layout = self.transport.rank, Layout.zigzag(TOKENS, world_size)
        self.errors: list[str] = []
        self.worst = 0.0

    def forward(self, seed: int, **options: Any) -> Flight | None:
        """None if it is refused."""
        found: list[Flight] = []
        self.attempt(lambda: found.append(Flight(self, seed, options)))
        return found[0] if found else None

    def backward(self, flight: Flight | None) -> None:
        assert flight is not None
        self.attempt(flight.backward)

    def attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (ValueError, RuntimeError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def compare(self, found: Tensor, exact: Tensor) -> None:
        error = (found.detach() - self.layout.shard(exact, self.rank)).abs().max()
        self.worst = max(self.worst, float(error))

    def outcome(self) -> Outcome:
        Flight(self, 99, {"name": "the last"}).backward()
        return Outcome(tuple(self.errors), self.transport.calls.number, self.worst)


class Flight:
    """One call. Its results are compared with the oracle's as they come."""

    def __init__(self, caller: Caller, seed: int, options: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.whole = [torch.randn(1, TOKENS, 2, 4, dtype=torch.float64, generator=draw) for _ in "qkvd"]
        self.caller, layout, rank = caller, caller.layout, caller.rank
        self.leaves = [layout.shard(x, rank).requires_grad_() for x in self.whole[:3]]
        q, k, v = self.leaves
        out = ring_attention(q, k, v, PATTERN, layout, group=caller.group, **options)
        assert isinstance(out, Tensor)
        self.out = out
        whole_q, whole_k, whole_v, _ = self.whole
        caller.compare(out, attention(whole_q, whole_k, whole_v, PATTERN)[0])

    def backward(self) -> None:
        q, k, v, dout = self.whole
        mine = self.caller.layout.shard(dout, self.caller.rank)
        found = torch.autograd.grad(self.out, self.leaves, mine, retain_graph=True)
        for x, y in zip(found, gradients(q, k, v, PATTERN, dout), strict=True):
            self.caller.compare(x, y)


Scenario = Callable[[Caller], None]


def take_part(group: Group, world_size: int, scenario: Scenario) -> Outcome:
    caller = Caller(group, world_size)
    scenario(caller)
    return caller.outcome()


def simulated(scenario: Scenario, world_size: int, seed: int = 0) -> list[Outcome]:
    def step(transport: Transport) -> Outcome:
        return take_part(transport, world_size, scenario)

    return Simulation(world_size, seed).run(step)


def on_real_ranks(scenario: Scenario) -> Outcome:
    """On a group of its own, whose calls begin with number 1."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return take_part(group, dist.get_world_size(), scenario)


# --- scenarios: what rank 1 does is another thing ---------------------------------------------------------------------


def forwards_swapped(caller: Caller) -> None:
    for number in (2, 1) if caller.rank == 1 else (1, 2):
        caller.forward(number, name=f"layer {number}")


def alike_forwards_swapped_without_names(caller: Caller) -> None:
    """Which nothing tells apart: the one thing that ranks must see to themselves."""
    for number in (2, 1) if caller.rank == 1 else (1, 2):
        caller.forward(number)


def backwards_swapped(caller: Caller) -> None:
    flights = [caller.forward(number, name=f"layer {number}") for number in (1, 2)]
    for flight in flights if caller.rank == 1 else flights[::-1]:
        caller.backward(flight)


def backward_left_out(caller: Caller) -> None:
    first = caller.forward(1)
    if caller.rank == 1:
        caller.forward(2)
    else:
        caller.backward(first)


def backward_left_out_at_the_end(caller: Caller) -> None:
    """The call that all make at the end is the one that is met: here it is tried, and refused."""
    first = caller.forward(1)
    if caller.rank == 1:
        caller.forward(99, name="the last")
    else:
        caller.backward(first)


def backward_tried_again(caller: Caller) -> None:
    """After the ranks were found in different calls all of them go through the backward that some had tried."""
    first = caller.forward(1)
    if caller.rank == 1:
        caller.forward(2)
    else:
        caller.backward(first)
    caller.backward(first)
    caller.backward(first)


def one_backward_twice(caller: Caller) -> None:
    first = caller.forward(1)
    caller.backward(first)
    if caller.rank == 1:
        caller.backward(first)
    else:
        caller.forward(2)


def interleaved(caller: Caller) -> None:
    """The same order on all ranks: as pipelines have it, with a graph that is gone through twice."""
    first, second = caller.forward(1), caller.forward(2, name="second")
    caller.backward(second)
    third = caller.forward(3)
    for flight in (first, third, first):
        caller.backward(flight)


def a_name_that_is_none(caller: Caller) -> None:
    caller.forward(1, name=3 if caller.rank == 1 else "3")


def a_second_thread(caller: Caller) -> None:
    """While the first one waits; then the backward of what it had under way."""
    first = caller.forward(1)
    if caller.rank == min(1, caller.transport.world_size - 1):
        in_second_thread(lambda: caller.forward(2))
    else:
        caller.forward(2)
    caller.backward(first)


def threads_that_end(caller: Caller) -> None:
    """One thread after the other, each for a call and its backward."""

    def call(number: int) -> None:
        caller.backward(caller.forward(number))

    for number in (1, 2, 3):
        in_second_thread(lambda number=number: call(number))  # type: ignore[misc]


def recomputed(caller: Caller, reentrant: bool, in_thread: bool) -> None:
    """Forwards in the thread that calls, all of them again while autograd goes back, perhaps for another thread."""
    layout, draw = caller.layout, torch.Generator().manual_seed(1)
    whole = [torch.randn(1, TOKENS, 2, 4, dtype=torch.float64, generator=draw) for _ in "qkvd"]
    leaves = [layout.shard(x, caller.rank).requires_grad_() for x in whole[:3]]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_attention(2 * q, k, v, PATTERN, layout, group=caller.group)
        assert isinstance(out, Tensor)
        return out

    out = checkpoint(attend, *leaves, use_reentrant=reentrant)
    assert isinstance(out, Tensor)

    def back() -> None:
        out.backward(layout.shard(whole[3], caller.rank))

    in_second_thread(back) if in_thread else back()
    q, *others, dout = whole
    dq, dk, dv = gradients(2 * q, others[0], others[1], PATTERN, dout)
    for leaf, exact in zip(leaves, (2 * dq, dk, dv), strict=True):
        assert leaf.grad is not None
        caller.compare(leaf.grad, exact)


def racing_threads(caller: Caller) -> None:
    """The own thread first on rank 0, a second one on rank 1: what each calls first would meet the other's."""
    group = caller.group
    begun = threading.Event()

    def second() -> None:
        other = Caller(group, caller.transport.world_size)
        if caller.rank != 1:
            begun.wait()
        flight = other.forward(2)
        if flight is not None:
            other.backward(flight)
        caller.errors.extend(other.errors)
        caller.worst = max(caller.worst, other.worst)

    thread = SecondThread(second)
    thread.start()
    if caller.rank == 1:
        thread.result()
    flight = caller.forward(1)
    begun.set()
    if caller.rank != 1:
        thread.result()
    if flight is not None:
        caller.backward(flight)
