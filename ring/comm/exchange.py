"""Executes a plan's messages: keys and values arrive step by step, and those of the next step are in flight during the
computation. It knows nothing of attention.

The exchange owns the buffers: a send buffer for local rows and two alternating receive buffers (`gather`: one). In
backward it has two more alternating buffers for gradients, and one for returned gradients. They are allocated once for
a call and reused at every step. A slot is the key, then the value, of one row and head: `ring.strided_view.Slot`.

Where received keys are kept (`direct-kept`), one buffer has those of all steps. The backward computes with them first,
and with the local keys last, while the last gradients return.

Gradients travel in the accumulator's dtype, except with `direct` between GPUs. There a slot's gradient is complete when
it is sent, and most kernels return it in 16 bits anyway. The owner sums it in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from ring.comm import buffer_meter
from ring.comm.transport import Message, Outgoing, Pending, Transport
from ring.plan.plan import Plan, SlotMap, Step
from ring.plan.schedule import Transfer
from ring.plan.tile import Node, SumTree
from ring.precision import accumulator_dtype
from ring.strided_view import GradientSum, OverwritingView, Slot, StridedView

# Most bytes of a message that a kernel reads: keys of a forward, which is done with its own keys before a copy engine
# is; the gradients that return last, while nothing is computed. A backward hides its keys.
_PULLED_KEYS, _PULLED_GRADIENTS = 2**21, 2**23
# Limit on a shard's rows and a buffer's slots: `ring.comm.packing` has them, and twice the slots, in 32-bit integers.
_MAX_COUNTED = 2**30


class NodeSums(Protocol):
    """Sums of gradients over trees of parts (`ring.plan.parts`)."""

    def insert(self, tree: SumTree, node: Node, value: torch.Tensor) -> None:
        """Add the sum of a node, (1, B, groups, 1, L, D)."""
        ...

    def take(self, tree: SumTree, node: Node) -> torch.Tensor:
        """Return the sum of a node whose parts were all added."""
        ...


Sums = TypeVar("Sums", bound=NodeSums)
T = TypeVar("T")


@dataclass(frozen=True)
class Arrival:
    """Keys and values ready for computation, and (backward) the sums of their gradients."""

    key: StridedView
    value: StridedView
    key_grad: StridedView | GradientSum | None = None
    value_grad: StridedView | GradientSum | None = None


class Exchange:
    """The messages of one call. k, v: (B, local tokens, Hk, head dim), any strides; their head dims may differ.

    keeps: keep received keys. kept: those of the forward, (slots, numbers of a slot); a backward with them sends none.
    """

    def __init__(
        self, plan: Plan, transport: Transport, k: torch.Tensor, v: torch.Tensor, *, keeps: bool = False,
        kept: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert (plan.rank, plan.tokens) == (transport.rank, k.shape[1])
        self.plan, self.transport, self.k, self.v, self.kept, self._keeps = plan, transport, k, v, kept, keeps
        self._allocated = 0
        self._last: tuple[tuple[Step, Pending], torch.Tensor] | None = None  # the last return, and its buffer
        self._sent: Pending | None = None  # the last keys and values

    @cached_property
    def _slot(self) -> Slot:
        return make_slot(self.k, self.v)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the arrivals of a forward: the local keys, then the received ones. Call `finish` after them."""
        if not self.plan.steps:
            yield Arrival(StridedView(self.k), StridedView(self.v))
            return
        with self._buffers("forward"):
            for arrival, _ in self._numbered_arrivals(_PULLED_KEYS):
                yield arrival

    def round_trips(self, dk: GradientSum, dv: GradientSum) -> Iterator[Arrival]:
        """Yield the arrivals of a backward. Gradients of received keys return to their owner, which adds them to its dk
        and dv, (B, tokens, Hk, D). The last are still in flight at the end: call `last_returned`, then `finish`.
        """
        if not self.plan.steps:
            yield Arrival(StridedView(self.k), StridedView(self.v), dk, dv)
            return
        with self._buffers("backward"):
            yield from self._round_trips(dk, dv)

    def _round_trips(self, dk: GradientSum, dv: GradientSum) -> Iterator[Arrival]:
        plan, sizes, kind = self.plan, self.plan.sizes, _gradient_dtype(self.plan, self.k)
        grads = [self._allocate(f"gradients {i}", sizes.sent_back, kind) for i in range(sizes.receive_buffers)]
        returned = self._allocate("returned gradients", sizes.returned, kind)
        due: tuple[Step, Pending] | None = None
        for arrival, number in self._numbered_arrivals():
            if number == 0:
                yield Arrival(arrival.key, arrival.value, dk, dv)
                continue
            step, grad = plan.steps[number - 1], grads[(number - 1) % len(grads)]
            with _gradient_views(step, grad, self._slot) as (key_grad, value_grad):
                yield Arrival(arrival.key, arrival.value, key_grad, value_grad)
            if due is not None:  # from the previous step: partial sums to carry on, and gradients of local keys
                grad[: due[0].carried] += self._add_returned(due, returned, dk, dv)
                dk.materialize()  # the buffer is reused
                dv.materialize()
                due[1].wait()
            due = step, self._return(step, number, grad, returned)
        if due is not None:
            self._last = due, returned

    def part_round_trips(self, dk: Sums, dv: Sums, make: Callable[[], Sums]) -> Iterator[tuple[Arrival, Sums, Sums]]:
        """Yield the arrivals of a backward with `same_bits`, and the sums of the gradients of their keys and values.
        Those of received keys return to the owner. The last are still in flight at the end: call `last_sums_returned`,
        then `finish`. make: makes sums.
        """
        if not self.plan.steps:
            yield Arrival(StridedView(self.k), StridedView(self.v)), dk, dv
            return
        with self._buffers("backward"):
            yield from self._part_round_trips(dk, dv, make)

    def _part_round_trips(self, dk: Sums, dv: Sums, make: Callable[[], Sums]) -> Iterator[tuple[Arrival, Sums, Sums]]:
        plan, sizes, kind = self.plan, self.plan.sizes, _gradient_dtype(self.plan, self.k)
        grads = [self._allocate(f"gradients {i}", sizes.sent_back, kind) for i in range(sizes.receive_buffers)]
        returned = self._allocate("returned gradients", sizes.returned, kind)
        for arrival, number in self._numbered_arrivals():
            if number == 0:
                yield arrival, dk, dv
                continue
            step, grad = plan.steps[number - 1], grads[(number - 1) % len(grads)]
            sums = make(), make()
            yield arrival, *sums
            for view, total in zip(StridedView.of_slots(grad, self._slot), sums, strict=True):
                for one in step.sums:
                    view.put(one.slots, one.columns, total.take(one.tree, one.node))
            if self._last is not None:
                self.last_sums_returned(dk, dv)
                self._last[0][1].wait()
            self._last = (step, self._return(step, number, grad, returned)), returned

    def last_sums_returned(self, dk: NodeSums, dv: NodeSums) -> None:
        """Wait for the sums returned last, and add them."""
        if self._last is None:
            return
        (step, pending), returned = self._last
        pending.arrive()
        for view, total in zip(StridedView.of_slots(returned, self._slot), (dk, dv), strict=True):
            for one in step.returned:  # copied: the buffer is used again
                total.insert(one.tree, one.node, view.view(one.slots, one.columns).clone())

    def last_returned(self, dk: GradientSum, dv: GradientSum) -> None:
        """Wait for the gradients returned last, and add them. Call it after the round trips."""
        if self._last is not None:
            self._add_returned(*self._last, dk, dv)

    def finish(self) -> None:
        """Wait until peers have read the last messages. Call it once the results are merged, which need not wait."""
        if self._sent is not None:
            self._sent.wait()
        if self._last is not None:
            (_, pending), _ = self._last
            pending.wait()

    def _return(self, step: Step, number: int, grad: torch.Tensor, returned: torch.Tensor) -> Pending:
        exposed = number == len(self.plan.steps) and self.kept is None  # nothing is computed in the meantime
        label, pulled = f"gradients {number}", _PULLED_GRADIENTS if exposed else 0
        return self.transport.post(
            _messages(step.return_sends, grad, label, pulled), _messages(step.return_receives, returned, label, pulled)
        )

    def _add_returned(
        self, due: tuple[Step, Pending], returned: torch.Tensor, dk: GradientSum, dv: GradientSum
    ) -> torch.Tensor:
        """Wait for returned gradients, add those of local keys, and return those to carry on."""
        step, pending = due
        pending.arrive()
        key, value = StridedView.of_slots(returned, self._slot)
        for scatter in step.scatters:
            dk.add(scatter.rows, scatter.heads, key.view(scatter.slots, scatter.columns))
            dv.add(scatter.rows, scatter.heads, value.view(scatter.slots, scatter.columns))
        return returned[: step.carried]

    def _numbered_arrivals(self, pulled: int = 0) -> Iterator[tuple[Arrival, int]]:
        """Yield (arrival, number); number 0 is the local keys. Step n + 1 is in flight while n is computed. pulled: see
        `Message`.
        """
        plan, sizes, dtype = self.plan, self.plan.sizes, self.k.dtype
        if self.kept is not None:
            yield from self._kept_arrivals(self.kept)
            return
        send_buffer = self._allocate("send buffer", sizes.send, dtype)
        received = self._received(sizes.receive_buffers, dtype)
        arrival = Arrival(StridedView(self.k), StridedView(self.v))
        pending: Pending | None = None
        for number, step in enumerate(plan.steps, start=1):
            if pending is not None:
                pending.wait()
            into, before = received[(number - 1) % len(received)], received[number % len(received)]
            self._pack(step.gathers, send_buffer)
            label = f"keys and values {number}"
            pending = self.transport.post(
                _messages(step.sends, before if step.relayed else send_buffer, label, pulled),
                _messages(step.receives, into, label, pulled),
            )
            yield arrival, number - 1
            pending.arrive()
            arrival = Arrival(*StridedView.of_slots(into, self._slot))
        self._sent = pending
        yield arrival, len(plan.steps)

    def _received(self, buffers: int, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Allocate the buffers that receive keys by turns; if they are kept, one for each step, side by side."""
        if not self._keeps:
            return [self._allocate(f"receive buffer {i}", self.plan.sizes.receive, dtype) for i in range(buffers)]
        slots = received_slots(self.plan)
        self.kept = self._allocate("kept keys", sum(slots), dtype)
        return self.kept.split(slots)

    def _kept_arrivals(self, kept: torch.Tensor) -> Iterator[tuple[Arrival, int]]:
        """Yield the arrivals of keys kept, then the local keys, with their numbers."""
        self._count(kept)
        for number, slots in enumerate(kept.split(received_slots(self.plan)), start=1):
            yield Arrival(*StridedView.of_slots(slots, self._slot)), number
        yield Arrival(StridedView(self.k), StridedView(self.v)), 0

    @property
    def keeping(self) -> list[torch.Tensor]:
        """The keys that are kept, if any."""
        return [] if self.kept is None else [self.kept]

    def in_order(self, of_arrivals: Sequence[T]) -> Sequence[T]:
        """Return what belongs to the local keys and to each step in the order in which a backward yields these."""
        return of_arrivals if self.kept is None else (*of_arrivals[1:], of_arrivals[0])

    def _pack(self, gathers: tuple[SlotMap, ...], send_buffer: torch.Tensor) -> None:
        """Fill the send buffer with the rows that a step sends."""
        if not gathers:
            return
        if _packs_in_one_pass(self.k, send_buffer):
            from ring.comm.packing import pack  # not at the top: torch for CPUs comes without Triton

            pack(gathers, self.k, self.v, send_buffer)
            return
        key, value = StridedView.of_slots(send_buffer, self._slot)
        k, v = StridedView(self.k), StridedView(self.v)
        for gather in gathers:
            key.put(gather.slots, gather.columns, k.view(gather.rows, gather.heads))
            value.put(gather.slots, gather.columns, v.view(gather.rows, gather.heads))

    def _allocate(self, name: str, slots: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a buffer, (slots, numbers of a slot)."""
        buffer = self.transport.empty(name, (slots, self._slot.numbers), dtype, self.k.device)
        self._count(buffer)
        return buffer

    def _count(self, buffer: torch.Tensor) -> None:
        self._allocated += buffer.nbytes
        buffer_meter.count(self.transport, buffer.nbytes)

    @contextmanager
    def _buffers(self, direction: str) -> Iterator[None]:
        key = (self.plan.setting, direction, self.k.dtype, self._slot)
        self.transport.prepare(key, lambda: outgoing(self.plan, direction, self.k, self.v))
        try:
            yield
        finally:
            buffer_meter.count(self.transport, -self._allocated)
            self._allocated = 0


def make_slot(k: torch.Tensor, v: torch.Tensor) -> Slot:
    """Return the slot of keys and values, (B, tokens, heads, D)."""
    return Slot(k.shape[0], k.shape[3], v.shape[3])


def outgoing(plan: Plan, direction: str, k: torch.Tensor, v: torch.Tensor) -> list[Outgoing]:
    """List all messages of a call and their send buffers, as `Exchange` posts them. k, v: of any tokens and heads."""
    sizes, numbers, kind, messages = plan.sizes, make_slot(k, v).numbers, _gradient_dtype(plan, k), []

    def sent(buffer: str, slots: int, dtype: torch.dtype, label: str, transfers: Sequence[Transfer]) -> list[Outgoing]:
        slot = numbers * dtype.itemsize  # bytes
        return [Outgoing(buffer, slots * slot, label, x.peer, x.start * slot, x.stop * slot) for x in transfers]

    for number, step in enumerate(plan.steps, start=1):
        source, slots = "send buffer", sizes.send
        if step.relayed:
            source, slots = f"receive buffer {number % sizes.receive_buffers}", sizes.receive
        if direction == "forward" or not plan.exchange.kept:
            messages += sent(source, slots, k.dtype, f"keys and values {number}", step.sends)
        if direction == "backward":
            source = f"gradients {(number - 1) % sizes.receive_buffers}"
            messages += sent(source, sizes.sent_back, kind, f"gradients {number}", step.return_sends)
    return messages


def received_slots(plan: Plan) -> list[int]:
    """Count the slots that each step receives."""
    return [max((x.stop for x in step.receives), default=0) for step in plan.steps]


def _gradient_dtype(plan: Plan, k: torch.Tensor) -> torch.dtype:
    """Return the dtype of gradients that return to their owner."""
    return k.dtype if plan.exchange.straight and k.is_cuda and not plan.chunked else accumulator_dtype(k.dtype)


def _packs_in_one_pass(k: torch.Tensor, send_buffer: torch.Tensor) -> bool:
    """Return True if one kernel fills the buffer: on GPUs, within its 32-bit limits."""
    return k.is_cuda and max(k.shape[1], send_buffer.shape[0]) <= _MAX_COUNTED


@contextmanager
def _gradient_views(step: Step, grad: torch.Tensor, slot: Slot) -> Iterator[tuple[StridedView, StridedView]]:
    """Views to which a step's tiles add gradients of keys and values; on exit `grad`, a buffer, has them."""
    if step.once:
        yield OverwritingView.of_slots(grad, slot)
        return
    work = accumulator_dtype(grad.dtype)
    sums = grad.zero_() if grad.dtype == work else torch.zeros_like(grad, dtype=work)
    yield StridedView.of_slots(sums, slot)
    if sums is not grad:
        grad.copy_(sums)


def _messages(transfers: Sequence[Transfer], buffer: torch.Tensor, label: str, pulled: int) -> list[Message]:
    return [Message(part.peer, buffer, label, part.start, part.stop, pulled) for part in transfers]
