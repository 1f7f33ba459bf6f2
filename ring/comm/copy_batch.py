"""What one batch of messages through the memory of GPUs takes: signals and copies on streams, prepared once for a kind
of call and repeated in every one (`ring.comm.symmetric_memory`).

The batch of rank 0 that sends to rank 1 and receives from it:

    side stream    tell 1 that it is ready; wait until 1 is; copy; tell 1 that it is done; wait until 1 is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ring.comm import signals
from ring.comm.signals import Signals
from ring.comm.transport import Message

_LANES = 4  # copies that may be under way at a time; in captured graphs they were seen one after the other


@dataclass(frozen=True, eq=False)
class Flags:
    """Where the flags of all ranks lie, seen from this one: two for every other rank, in each rank's memory."""

    rank: int
    begins: list[int]

    def ready(self, at: int, sender: int) -> int:
        """Address, in the memory of rank `at`, of the flag that the sender's buffers are filled."""
        return self.begins[at] + signals.BYTES * sender

    def done(self, at: int, receiver: int) -> int:
        """Address, in the memory of rank `at`, of the flag that the receiver has copied."""
        return self.begins[at] + signals.BYTES * (len(self.begins) + receiver)


@dataclass(frozen=True, eq=False)
class Copy:
    """Of a message, by its place among those that are received: from which address, and how many bytes."""

    place: int
    source: int
    size: int


class Consumer:
    """A rank that copies from this one."""

    def __init__(self, peer: int, flags: Flags) -> None:
        mine = flags.done(flags.rank, peer)
        self.tell = [signals.put(flags.ready(peer, flags.rank), 1)]
        self.wait = [signals.wait(mine, 1), signals.put(mine, 0)]


class Producer:
    """A rank from which this one copies."""

    def __init__(self, peer: int, flags: Flags, copies: tuple[Copy, ...]) -> None:
        mine = flags.ready(flags.rank, peer)
        self.copies = copies
        self.wait = [signals.wait(mine, 1), signals.put(mine, 0)]
        self.tell = [signals.put(flags.done(peer, flags.rank), 1)]


@dataclass(frozen=True, eq=False)
class Streams:
    """Beside the call's own. side: for signals; lanes: for copies from several ranks at a time."""

    side: torch.cuda.Stream
    lanes: tuple[torch.cuda.Stream, ...]

    @classmethod
    def of(cls, world_size: int) -> Streams:
        lanes = min(_LANES, world_size - 1)
        return cls(torch.cuda.Stream(), tuple(torch.cuda.Stream() for _ in range(lanes if lanes > 1 else 0)))


@dataclass(frozen=True, eq=False)
class PendingCopies:
    """A batch on the side stream. here: events after which its receives are copied, one a lane; read: the event after
    which its sends are copied too.
    """

    here: Sequence[torch.cuda.Event]
    read: torch.cuda.Event
    current: torch.cuda.Stream  # of the call

    def arrive(self) -> None:
        for copied in self.here:
            self.current.wait_event(copied)

    def wait(self) -> None:
        self.current.wait_event(self.read)


class CopyBatch:
    """The batch of one label, for calls of one kind. readers, owners: nearest first.

    Every flag that others wait for is set before this rank waits for any flag, or depends only on flags that they set
    so. So ranks never wait for each other in a circle, in whatever order the GPU executes the streams.
    """

    def __init__(self, readers: Sequence[Consumer], owners: Sequence[Producer], streams: Streams) -> None:
        self._side, self._lanes = streams.side, streams.lanes[: len(owners)] if len(owners) > 1 else ()
        self._owners = owners
        tell = [one for reader in readers for one in reader.tell]
        read = [one for reader in readers for one in reader.wait]
        if not self._lanes and owners:  # all on one stream, in as few steps
            tell, read = tell + owners[0].wait, owners[0].tell + read
        self._tell, self._read = Signals(tell), Signals(read)
        self._before = [Signals(owner.wait) for owner in owners]
        self._after = [Signals(owner.tell) for owner in owners]
        # A stream that waits for an event waits for what was recorded last, so each call records the same ones again.
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._here = [torch.cuda.Event() for _ in (self._lanes or owners)]

    def run(self, receives: Sequence[Message], current: torch.cuda.Stream) -> PendingCopies:
        """receives: of the same sizes in every call, but anywhere. current: the stream of the call."""
        side = self._side
        self._begun.record(current)
        side.wait_event(self._begun)
        self._tell(side)
        if self._lanes:
            self._copy_on_lanes(receives)
        elif self._owners:
            _copy(self._owners[0], receives, side)
            self._here[0].record(side)
        self._read(side)
        self._done.record(side)
        return PendingCopies(self._here, self._done, current)

    def _copy_on_lanes(self, receives: Sequence[Message]) -> None:
        side, lanes = self._side, self._lanes
        self._begun.record(side)
        for lane in lanes:
            lane.wait_event(self._begun)
        for number, owner in enumerate(self._owners):
            lane = lanes[number % len(lanes)]
            self._before[number](lane)
            _copy(owner, receives, lane)
            self._after[number](lane)
            self._here[number % len(lanes)].record(lane)  # the lane's last is what remains
        for here in self._here:
            side.wait_event(here)


def _copy(owner: Producer, receives: Sequence[Message], stream: torch.cuda.Stream) -> None:
    for one in owner.copies:
        signals.copy(receives[one.place].address, one.source, one.size, stream)
