"""Messages in flight between simulated ranks: the expected contents of their buffers, and overlaps of these."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ring.comm.transport import Message

Span = tuple[int, int, str]  # first byte, the byte after the last, label


class InFlight:
    """One end of a message, from its post to the end of its wait."""

    __slots__ = ("message", "batch", "bits", "expected", "partner", "delivered", "start", "stop")

    def __init__(self, message: Message, batch: Batch, scribble: bool) -> None:
        self.message, self.batch = message, batch
        self.bits = view_bits(message.tensor)
        if scribble:
            self.bits.fill_(-1)  # every bit set: a NaN in any floating-point type
        self.expected = self.bits.clone()  # contents that the buffer must have until the wait is over
        self.partner: InFlight | None = None
        self.delivered = False
        self.start, self.stop = span(message)

    @property
    def intact(self) -> bool:
        return torch.equal(self.bits, self.expected)

    def release(self) -> None:
        """Drop the rank's memory once the wait is over, but keep the message's description, for reports."""
        self.message = Message(self.message.peer, self.message.tensor.to("meta"), self.message.label)
        self.bits = self.expected
        self.partner = None


@dataclass(eq=False)
class Batch:
    """The messages of one `post`."""

    number: int
    rank: int
    sends: list[InFlight] = field(default_factory=list)
    receives: list[InFlight] = field(default_factory=list)
    open: int = 0  # number of ends that `wait` still waits for
    receiving: int = 0  # number of receives among them, which `arrive` waits for
    arriving: bool = False  # the rank is in `arrive`
    received: bool = False  # the rank has its receive buffers back
    over: bool = False  # the rank has all its buffers back


def overlap(into: list[Span], out: list[Span]) -> tuple[str, str] | None:
    """Find two buffers that share a byte, at least one of them a receive buffer; return both in words."""
    into = sorted(into)
    for (_, stop, label), (start, _, other) in pairwise(into):
        if start < stop:
            return f"the receive of {label!r}", f"the receive of {other!r}"
    starts = [start for start, _, _ in into]
    for start, stop, label in out:
        at = bisect_left(starts, stop)  # number of receives that begin before this send ends
        if at and into[at - 1][1] > start:
            return f"the send of {label!r}", f"the receive of {into[at - 1][2]!r}"
    return None


def view_bits(x: torch.Tensor) -> torch.Tensor:
    """View contiguous x as integers, so that NaN equals itself."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def span(message: Message) -> tuple[int, int]:
    start = message.tensor.data_ptr()
    return start, start + message.bytes


def described(message: Message) -> str:
    return f"{message.label!r} ({message.bytes} bytes of {str(message.tensor.dtype).removeprefix('torch.')})"
