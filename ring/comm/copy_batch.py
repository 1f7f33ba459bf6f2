"""One batch of messages through GPU memory: signals and copies on streams. It is prepared once for each kind of call
and repeated in every call (`ring.comm.symmetric_memory`).

A batch of rank 0 that sends to rank 1 and receives from it:

    side stream    signal "ready" to 1; wait for 1's "ready"; copy; signal "done" to 1; wait for 1's "done"

Copies from several ranks run one after the other, from the next rank first: then every GPU is read by one other at a
time. On four H200s a rank received messages of 128 MiB at 350 GB/s so, and by three copies at once at 206 to 252.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from ring.comm import signals
from ring.comm.signals import Signals
from ring.comm.transport import Message, Put

SHARES, SHARE_WARPS = 32, 8  # programs of a kernel that reads a message, with a flag each; warps of a program


@dataclass(frozen=True, eq=False)
class Flags:
    """Addresses of the flags of all ranks, valid on this one. Each rank has for every other one "ready", "done", and
    "ready" of each program that reads it.
    """

    rank: int
    begins: list[int]

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Count the bytes of a rank's flags."""
        return (2 + SHARES) * ranks * signals.BYTES

    def ready(self, at: int, sender: int) -> int:
        """Address, in the memory of rank `at`, of the flag "the sender's buffers are filled"."""
        return self.begins[at] + signals.BYTES * sender

    def share(self, at: int, sender: int) -> int:
        """Address, in the memory of rank `at`, of the first flag "ready" of the programs that read the sender."""
        return self.begins[at] + signals.BYTES * (2 * len(self.begins) + SHARES * sender)

    def done(self, at: int, receiver: int) -> int:
        """Address, in the memory of rank `at`, of the flag "the receiver has copied"."""
        return self.begins[at] + signals.BYTES * (len(self.begins) + receiver)


@dataclass(frozen=True, eq=False)
class Copy:
    """The copy of one received message. place: its index among the receives; source: an address; size: in bytes."""

    place: int
    source: int
    size: int


class Lane(NamedTuple):
    """A rank that reads here, and one that is read here, for `ring.comm.pull_kernel`. Either may be missing.

    ready_there, ready_here: addresses of the first flag of SHARES; done_there: of a count; 0: none.
    copies: (source, to, size) in bytes, from the start of the own shared memory, and of the buffer of the receives.
    """

    ready_there: int = 0
    ready_here: int = 0
    done_there: int = 0
    copies: Sequence[tuple[int, int, int]] = ()


class Consumer:
    """A rank that copies from this one."""

    def __init__(self, peer: int, flags: Flags) -> None:
        done = flags.done(flags.rank, peer)
        self.signal_ready = [signals.put(flags.ready(peer, flags.rank), 1)]
        self.wait_done = [signals.wait(done, 1), signals.put(done, 0)]


class Producer:
    """A rank from which this one copies."""

    def __init__(self, peer: int, flags: Flags, copies: tuple[Copy, ...]) -> None:
        ready = flags.ready(flags.rank, peer)
        self.copies = copies
        self.wait_ready = [signals.wait(ready, 1), signals.put(ready, 0)]
        self.signal_done = [signals.put(flags.done(peer, flags.rank), 1)]


@dataclass(frozen=True, eq=False)
class PendingCopies:
    """A batch on the side stream. received: the event recorded when the receives are copied; complete: when peers have
    copied the sends too; current: the stream of the call; sources: tensors that the side stream reads, kept until then.
    """

    received: torch.cuda.Event
    complete: torch.cuda.Event
    current: torch.cuda.Stream
    sources: Sequence[torch.Tensor] = ()

    def arrive(self) -> None:
        self.current.wait_event(self.received)

    def wait(self) -> None:
        self.current.wait_event(self.complete)


class CopyBatch:
    """The batch of one label, for one kind of call. consumers, producers: nearest first.

    A rank sets every "ready" before it waits for any flag, and each "done" depends only on a "ready". So ranks cannot
    deadlock, in whatever order the GPU executes the streams.
    """

    def __init__(self, consumers: Sequence[Consumer], producers: Sequence[Producer], side: torch.cuda.Stream) -> None:
        self._side, self._producers = side, producers
        # What precedes each copy, and what follows the last, in as few submissions as possible.
        steps = [_all(x.signal_ready for x in consumers)]
        for producer in producers:
            steps[-1] += producer.wait_ready
            steps.append([*producer.signal_done])
        steps[-1] += _all(x.wait_done for x in consumers)
        self._before, self._after = [Signals(x) for x in steps[:-1]], Signals(steps[-1])
        # Reuse the events in every call: a stream waits for the latest record of an event.
        self._begun, self._received, self._complete = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()

    def run(self, receives: Sequence[Message], current: torch.cuda.Stream) -> PendingCopies:
        """receives: the same sizes in every call, at any addresses. current: the stream of the call."""
        side = self._side
        self._begun.record(current)
        side.wait_event(self._begun)
        for signals_before, producer in zip(self._before, self._producers, strict=True):
            signals_before(side)
            _copy(producer, receives, side)
        self._received.record(side)
        self._after(side)
        self._complete.record(side)
        return PendingCopies(self._received, self._complete, current)


class PullBatch:
    """The batch of one label whose messages a kernel reads, for one kind of call. pull, wait: see
    `ring.comm.pull_kernel`.
    """

    def __init__(
        self, pull: Callable[[torch.Tensor | None], None], wait: Callable[[], None], side: torch.cuda.Stream
    ) -> None:
        self._side, self._pull, self._wait = side, pull, wait
        self._begun, self._received, self._complete = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()

    def run(self, receives: Sequence[Message], current: torch.cuda.Stream) -> PendingCopies:
        """receives: the same sizes in every call, in one buffer at any address. current: the stream of the call."""
        side = self._side
        self._begun.record(current)
        side.wait_event(self._begun)
        with torch.cuda.stream(side):
            self._pull(receives[0].buffer if receives else None)
            self._received.record(side)
            self._wait()
        self._complete.record(side)
        return PendingCopies(self._received, self._complete, current)


class PutBatch:
    """The batch of one label in which every rank writes into the others' memory, for one kind of call.

    writers: ranks that write here. receivers: ranks that are written to. The flags are those of copies: the owner of a
    free buffer sets "ready", and who has written to it "done".
    """

    def __init__(
        self, writers: Sequence[Consumer], receivers: Sequence[Producer],
        puts: Sequence[Callable[[torch.Tensor, torch.Tensor], None]], side: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        self._side, self._puts = side, puts
        self._ready = Signals(_all(x.signal_ready for x in writers) + _all(x.wait_ready for x in receivers))
        self._done = Signals(_all(x.signal_done for x in receivers) + _all(x.wait_done for x in writers))
        self._begun, self._complete = torch.cuda.Event(), torch.cuda.Event()

    def run(self, puts: Sequence[Put], current: torch.cuda.Stream) -> PendingCopies:
        """puts: of the same shapes in every call. current: the stream of the call."""
        side = self._side
        self._begun.record(current)
        side.wait_event(self._begun)
        self._ready(side)
        with torch.cuda.stream(side):
            for write, put in zip(self._puts, puts, strict=True):
                write(put.tensor, put.own)
        self._done(side)
        self._complete.record(side)
        return PendingCopies(self._complete, self._complete, current, [put.tensor for put in puts])


def can_pull(device: int, ranks: int) -> bool:
    """Return True if kernels of a GPU can add to its peers' memory in one step, and half of it has room for a batch of
    so many ranks.
    """
    mine = torch.cuda.get_device_properties(device)
    room = mine.multi_processor_count * mine.max_threads_per_multi_processor // (32 * SHARE_WARPS)
    peers = [
        i for i in range(torch.cuda.device_count()) if i != device and torch.cuda.can_device_access_peer(device, i)
    ]
    return 2 * SHARES * (ranks - 1) <= room and all(signals.has_atomics(device, peer) for peer in peers)


def _all(signals_of: Iterable[list[signals.Operation]]) -> list[signals.Operation]:
    return list(chain.from_iterable(signals_of))


def _copy(producer: Producer, receives: Sequence[Message], stream: torch.cuda.Stream) -> None:
    for copy in producer.copies:
        signals.copy(receives[copy.place].address, copy.source, copy.size, stream)
