"""Walking a plan's messages: K/V arrive step by step, the next step in flight while the present one is computed.

Buffers belong to the exchange: an outbox for the own packed rows and two landings in turn (`gather`: one); in
backward also two gradient buffers in turn and a box for gradients that come back. They are made once for a call and
reused at every step. A slot is K and V of one row and head: (2, B, D). Knows nothing of attention.

Gradients travel in the accumulator's type, but for `direct` between GPUs: there a slot's is complete when it leaves,
and comes from a kernel in 16 bits as a rule; it goes home in the working type, and is summed in the accumulator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ring.comm.transport import Message, Outgoing, Pending, Transport
from ring.compute.accumulator import Summing, accumulator_dtype
from ring.plan.plan import Plan, SlotMap, Step, Tile
from ring.plan.schedule import Transfer
from ring.strided_view import Store, Written


@dataclass(eq=False)
class Measure:
    """Bytes of communication buffers: held now, and at most so far."""

    transport: Transport | None
    held: int = 0
    bytes: int = 0


_measures: list[Measure] = []


@contextmanager
def measure(transport: Transport | None = None) -> Iterator[Measure]:
    """Count the communication buffers that calls inside allocate; `.bytes` is the peak.

    transport: count those of calls over it; None: those of the whole process. Not those of this thread: ranks may be
    threads of one process, and autograd runs a backward on GPUs in threads of its own.
    """
    found = Measure(transport)
    _measures.append(found)
    try:
        yield found
    finally:
        _measures.remove(found)


@dataclass(frozen=True)
class Arrival:
    """Tiles that can be computed now, the keys and values they read, and (backward) where gradients are summed."""

    tiles: tuple[Tile, ...]
    key: Store
    value: Store
    key_grad: Store | Summing | None = None
    value_grad: Store | Summing | None = None


class Exchange:
    """One call's walk over a plan. k, v: (B, local tokens, Hk, D), any strides."""

    def __init__(self, plan: Plan, transport: Transport, k: torch.Tensor, v: torch.Tensor) -> None:
        assert (plan.rank, plan.tokens) == (transport.rank, k.shape[1])
        self.plan, self.transport, self.k, self.v = plan, transport, k, v
        self._allocated = 0
        self._last: tuple[tuple[Step, Pending], torch.Tensor] | None = None  # gradients on their way home, and the box

    def arrivals(self) -> Iterator[Arrival]:
        """Forward: the own keys first, then what lands."""
        with self._buffers("forward"):
            for arrival, _ in self._landings():
                yield arrival

    def round_trips(self, dk: Summing, dv: Summing) -> Iterator[Arrival]:
        """Backward: the same arrivals; gradients of landed keys go home and are added to dk, dv, (B, tokens, Hk, D).
        The last are then still on their way: `last_home` and `finish` belong to it.
        """
        with self._buffers("backward"):
            yield from self._round_trips(dk, dv)

    def _round_trips(self, dk: Summing, dv: Summing) -> Iterator[Arrival]:
        plan, kind = self.plan, self._gradient_dtype
        grads = [self._allocate(f"gradients {i}", plan.sizes.receive, kind) for i in range(plan.sizes.receive_buffers)]
        returned = self._allocate("returned", plan.sizes.returned, kind)
        due: tuple[Step, Pending] | None = None
        for arrival, number in self._landings():
            if number == 0:
                yield Arrival(arrival.tiles, arrival.key, arrival.value, dk, dv)
                continue
            step, grad = plan.steps[number - 1], grads[(number - 1) % len(grads)]
            with _summed(step, grad) as (key_grad, value_grad):
                yield Arrival(arrival.tiles, arrival.key, arrival.value, key_grad, value_grad)
            if due is not None:  # what the step before sent back: partial sums to carry on, and gradients that are home
                grad[: due[0].carried] += self._collect(due, returned, dk, dv)
                dk.settle()  # the box is used again
                dv.settle()
                due[1].wait()
            due = step, self._return(step, number, grad, returned)
        if due is not None:
            self._last = due, returned

    def last_home(self, dk: Summing, dv: Summing) -> None:
        """After the round trips: await the gradients that come home last, and add them."""
        if self._last is not None:
            self._collect(*self._last, dk, dv)

    def finish(self) -> None:
        """After a backward's gradients are summed: wait until others have read what was sent last."""
        if self._last is not None:
            (_, pending), _ = self._last
            pending.wait()

    def _return(self, step: Step, number: int, grad: torch.Tensor, returned: torch.Tensor) -> Pending:
        return self.transport.post(
            _messages(step.return_sends, grad, f"gradients {number}"),
            _messages(step.return_receives, returned, f"gradients {number}"),
        )

    def _collect(self, due: tuple[Step, Pending], returned: torch.Tensor, dk: Summing, dv: Summing) -> torch.Tensor:
        """Await returned gradients, add those that are home, and give back those to be carried on."""
        step, pending = due
        pending.arrive()
        key, value = Store.slots(returned[:, 0]), Store.slots(returned[:, 1])
        for pack in step.scatters:
            dk.add(pack.rows, pack.heads, key.view(pack.slots, pack.columns))
            dv.add(pack.rows, pack.heads, value.view(pack.slots, pack.columns))
        return returned[: step.carried]

    def _landings(self) -> Iterator[tuple[Arrival, int]]:
        """(arrival, its number), number 0 being the own keys. Step n + 1 is in flight while n is computed."""
        plan, sizes = self.plan, self.plan.sizes
        outbox = self._allocate("outbox", sizes.send, self.k.dtype)
        landings = [self._allocate(f"landing {i}", sizes.receive, self.k.dtype) for i in range(sizes.receive_buffers)]
        arrival = Arrival(plan.local, Store(self.k), Store(self.v))
        pending: Pending | None = None
        for number, step in enumerate(plan.steps, start=1):
            if pending is not None:
                pending.wait()
            landing, before = landings[(number - 1) % len(landings)], landings[number % len(landings)]
            self._pack(step.gathers, outbox)
            pending = self.transport.post(
                _messages(step.sends, before if step.relayed else outbox, f"keys and values {number}"),
                _messages(step.receives, landing, f"keys and values {number}"),
            )
            yield arrival, number - 1
            pending.arrive()
            arrival = Arrival(step.tiles, Store.slots(landing[:, 0]), Store.slots(landing[:, 1]))
        yield arrival, len(plan.steps)
        if pending is not None:
            pending.wait()

    def _pack(self, packs: Sequence[SlotMap], outbox: torch.Tensor) -> None:
        if not packs:
            return
        if self.k.is_cuda:
            from ring.comm.packing import pack as pack_at_once

            pack_at_once(packs, self.k, self.v, outbox)
            return
        key, value = Store.slots(outbox[:, 0]), Store.slots(outbox[:, 1])
        k, v = Store(self.k), Store(self.v)
        for pack in packs:
            key.put(pack.slots, pack.columns, k.view(pack.rows, pack.heads))
            value.put(pack.slots, pack.columns, v.view(pack.rows, pack.heads))

    @property
    def _gradient_dtype(self) -> torch.dtype:
        """Of gradients on their way home."""
        complete = self.plan.exchange == "direct" and self.k.is_cuda
        return self.k.dtype if complete else accumulator_dtype(self.k.dtype)

    def _allocate(self, name: str, slots: int, dtype: torch.dtype) -> torch.Tensor:
        """(slots, 2, B, D)"""
        batch, _, _, dim = self.k.shape
        buffer = self.transport.empty(name, (slots, 2, batch, dim), dtype, self.k.device)
        size = buffer.numel() * buffer.element_size()
        self._allocated += size
        for found in self._measured():
            found.held += size
            found.bytes = max(found.bytes, found.held)
        return buffer

    def _measured(self) -> list[Measure]:
        return [found for found in _measures if found.transport in (None, self.transport)]

    def _outgoing(self, direction: str) -> list[Outgoing]:
        """All messages of a call, and the buffers that they are sent from: what `_landings` and `_return` will do."""
        plan, sizes, dtype = self.plan, self.plan.sizes, self.k.dtype
        found = []
        for number, step in enumerate(plan.steps, start=1):
            source, slots = (
                ("outbox", sizes.send)
                if not step.relayed
                else (f"landing {number % sizes.receive_buffers}", sizes.receive)
            )
            found += [self._sent(source, slots, dtype, f"keys and values {number}", move) for move in step.sends]
            if direction == "backward":
                source, kind = f"gradients {(number - 1) % sizes.receive_buffers}", self._gradient_dtype
                found += [
                    self._sent(source, sizes.receive, kind, f"gradients {number}", move) for move in step.return_sends
                ]
        return found

    def _sent(self, buffer: str, slots: int, dtype: torch.dtype, label: str, move: Transfer) -> Outgoing:
        slot = 2 * self.k.shape[0] * self.k.shape[3] * dtype.itemsize  # bytes
        return Outgoing(buffer, slots * slot, label, move.peer, move.start * slot, move.stop * slot)

    @contextmanager
    def _buffers(self, direction: str) -> Iterator[None]:
        key = (self.plan.setting, direction, self.k.dtype, self.k.shape[0], self.k.shape[3])
        self.transport.prepare(key, lambda: self._outgoing(direction))
        try:
            yield
        finally:
            for found in self._measured():
                found.held -= self._allocated
            self._allocated = 0


@contextmanager
def _summed(step: Step, grad: torch.Tensor) -> Iterator[tuple[Store, Store]]:
    """Where a step's tiles put gradients of keys and of values; after it they are in `grad`, (slots, 2, B, D)."""
    if step.once:
        yield Written.slots(grad[:, 0]), Written.slots(grad[:, 1])
        return
    work = accumulator_dtype(grad.dtype)
    sums = grad.zero_() if grad.dtype == work else torch.zeros_like(grad, dtype=work)
    yield Store.slots(sums[:, 0]), Store.slots(sums[:, 1])
    if sums is not grad:
        grad.copy_(sums)


def _messages(moves: Sequence[Transfer], buffer: torch.Tensor, label: str) -> list[Message]:
    return [Message(move.peer, buffer[move.start : move.stop], label) for move in moves]
