"""The transports of simulated ranks: `SimulatedTransport` checks one rank's calls, and the `Network` of its group
matches messages and collectives, as `verification.run.simulation.simulation` describes.

Each group has its own network, so messages of two groups with the same ranks never meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import torch

from ring.comm.call_order import Calls
from ring.comm.transport import LocalBuffers, Message, Outgoing, Pending
from verification.failures import BrokenContract, MismatchedMessages
from verification.run.simulation.announced_sends import Announced
from verification.run.simulation.eager_delivery import DeliveryPolicy
from verification.run.simulation.in_flight import Batch, InFlight, described, overlap, span
from verification.run.simulation.scheduler import Scheduler

Ends = dict[tuple[int, int], deque[InFlight]]  # of messages, by (from, to)


class SimulatedTransport(LocalBuffers):
    """The transport of one rank. hosts: the host of each rank of the group."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.world_size, self.calls = rank, network.size, Calls()
        self.hosts = network.hosts
        self._network = network
        self._batches: list[Batch] = []  # not waited for yet
        self._posted = 0
        self._collectives = 0
        self._calls = 0
        self._outgoing: dict[Hashable, list[Outgoing]] = {}
        self._announced: Announced | None = None

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        self._network.pause(self.rank)
        self._network.check_call(self.rank, self._calls, key)
        self._calls += 1
        if key not in self._outgoing:  # calls of one kind announce the same messages
            self._outgoing[key] = outgoing()
        self._announced = Announced(self._network.name(self.rank), self._outgoing[key])

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().empty(name, shape, dtype, device)
        if self._announced is not None:
            self._announced.check_buffer(name, buffer)
        return buffer

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self._network.pause(self.rank)
        batch = Batch(self._posted, self.rank)
        self._posted += 1
        self._check(sends, receives)
        if self._announced is not None:
            self._announced.check_sends(sends)
        self._batches.append(batch)
        self._network.launch(batch, sends, receives)
        return _Handle(self, batch)

    def arrive(self, batch: Batch) -> None:
        if batch.received:
            return
        self._network.pause(self.rank)
        self._network.await_receives(batch)
        self._network.receive(batch)

    def wait(self, batch: Batch) -> None:
        if batch.over:
            return
        self._network.pause(self.rank)
        if batch.open:
            self._network.wait_for(self.rank, batch)
        self._network.finish(batch)
        self._batches.remove(batch)

    def all_equal(self, payload: bytes) -> bool:
        if len(payload) % 8:
            raise ValueError(f"payload must be a multiple of 8 bytes, got {len(payload)}")
        return len(set(self._collective("all_equal", payload))) == 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._collective("all_gather", payload)

    def subgroup(self, ranks: Sequence[int]) -> SimulatedTransport | None:
        """Return the transport of a group of these ranks; None on all others."""
        return self._network.subgroup(ranks)[list(ranks).index(self.rank)] if self.rank in ranks else None

    def stop_host(self) -> NoReturn:
        """Stop all ranks of this rank's host for good, as if it had lost its power."""
        self._network.stop_host(self.rank)

    def check_all_waited(self) -> None:
        """Raise BrokenContract if this rank ends with a batch that it posted and never waited for."""
        network = self._network
        if self._batches:
            batch = self._batches[0]
            ends = [f"send of {described(f.message)} to {network.name(f.message.peer)}" for f in batch.sends]
            ends += [f"receive of {described(f.message)} from {network.name(f.message.peer)}" for f in batch.receives]
            raise BrokenContract(
                f"{network.name(self.rank)} never waited for batch {batch.number}: {', '.join(ends) or 'empty'}"
            )

    def _collective(self, kind: str, payload: bytes) -> list[bytes]:
        self._network.pause(self.rank)
        self._collectives += 1
        return self._network.collective(self.rank, self._collectives - 1, kind, payload)

    def _check(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for message in (*sends, *receives):
            if not 0 <= message.peer < self.world_size or message.peer == self.rank:
                raise ValueError(
                    f"peer must be another rank of the {self.world_size}, got {message.peer} on rank {self.rank}"
                )
            if not message.tensor.is_contiguous() or not message.tensor.numel():
                raise ValueError(f"message {message.label!r} must be contiguous and not empty")
        # Check before any buffer is overwritten: a receive buffer must share no byte with another one in flight.
        into = [(*span(m), m.label) for m in receives]
        out = [(*span(m), m.label) for m in sends]
        for batch in self._batches:
            into += [(f.start, f.stop, f.message.label) for f in batch.receives if not batch.received]
            out += [(f.start, f.stop, f.message.label) for f in batch.sends]
        shared = overlap(into, out)
        if shared is not None:
            raise BrokenContract(
                f"{self._network.name(self.rank)} shares bytes between the buffers of {shared[0]} and {shared[1]}, "
                "both in flight"
            )


@dataclass(frozen=True)
class _Handle:
    transport: SimulatedTransport
    batch: Batch

    def arrive(self) -> None:
        self.transport.arrive(self.batch)

    def wait(self) -> None:
        self.transport.wait(self.batch)


class Shared(Protocol):
    """The part of the `Simulation` that the networks of all groups share."""

    scheduler: Scheduler
    hosts: tuple[int, ...]  # the host of each rank of the simulation
    buffered: bool  # sends complete before their receive is posted
    delivery: DeliveryPolicy | None  # None: random numbers of the scheduler decide when messages arrive
    waiting: dict[int, tuple[Network, Batch | Collective]]  # reason of each blocked rank, by its number

    def label(self, number: int) -> str:
        """Name of a rank in reports. number: in the simulation."""

    def network(self, members: tuple[int, ...]) -> Network:
        """Return the network of the group of these ranks of the simulation."""


class Network:
    """The network of one group. members: its ranks' numbers in the simulation; all other ranks are indices in it."""

    def __init__(self, shared: Shared, members: Sequence[int]) -> None:
        self.members, self.size = tuple(members), len(members)
        self.hosts = tuple(shared.hosts[number] for number in self.members)
        self.transports = [SimulatedTransport(self, rank) for rank in range(self.size)]
        self._shared = shared
        self._sends: Ends = {}  # posted, without a receive so far
        self._receives: Ends = {}
        self._collectives: list[Collective] = []
        self._calls: list[Hashable] = []  # kinds of the calls that were prepared, in order

    def name(self, rank: int) -> str:
        return self._shared.label(self.members[rank])

    def pause(self, rank: int) -> None:
        """Perhaps let other ranks go first."""
        self._shared.scheduler.pause(self.members[rank])

    def subgroup(self, ranks: Sequence[int]) -> Sequence[SimulatedTransport]:
        """Return the transports of the group of these ranks, which is made once."""
        return self._shared.network(tuple(self.members[rank] for rank in ranks)).transports

    def stop_host(self, rank: int) -> NoReturn:
        """Stop all ranks of the simulation that share this rank's host."""
        hosts = self._shared.hosts
        on_host = [number for number, host in enumerate(hosts) if host == self.hosts[rank]]
        self._shared.scheduler.stop(self.members[rank], on_host)

    def unreceived(self) -> str | None:
        """Describe a buffered message that nobody received: a later receive would take it."""
        for (source, target), ends in self._sends.items():
            for end in ends:
                return f"{self.name(target)} never received {described(end.message)} from {self.name(source)}"
        return None

    def check_call(self, rank: int, number: int, key: Hashable) -> None:
        """Raise BrokenContract unless the number-th call of this rank is of the same kind as the others'."""
        if number == len(self._calls):
            self._calls.append(key)
        if self._calls[number] != key:
            raise BrokenContract(f"{self.name(rank)} prepares another kind of call than others do")

    # --- messages -----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Start a batch that a rank has posted: match its messages with those posted by its peers."""
        batch.receives = [InFlight(message, batch, scribble=True) for message in receives]
        batch.sends = [InFlight(message, batch, scribble=False) for message in sends]
        batch.receiving = len(batch.receives)
        batch.open = batch.receiving + (0 if self._shared.buffered else len(batch.sends))
        for end in batch.receives:
            self._match(end, self._sends, self._receives, (end.message.peer, batch.rank))
        for end in batch.sends:
            self._match(end, self._receives, self._sends, (batch.rank, end.message.peer))
        if self._shared.delivery is not None:
            self._receive_at_once(batch, self._shared.delivery)

    def _receive_at_once(self, batch: Batch, delivery: DeliveryPolicy) -> None:
        """Deliver all receives that are not held back. The rank still gets its buffers back only at its wait."""
        self.await_receives(batch)
        for end in batch.receives:
            source, text = end.message.peer, described(end.message)
            delivery.received[source, batch.rank, end.message.label] = f"{text} from {self.name(source)}"
            if not end.delivered and not delivery.holds_back(end.message, batch.rank):
                assert end.partner is not None
                self._deliver(end.partner, end)

    def _match(self, end: InFlight, partners: Ends, own: Ends, route: tuple[int, int]) -> None:
        waiting = partners.get(route)
        if not waiting:
            own.setdefault(route, deque()).append(end)
            return
        partner = waiting.popleft()
        send, receive = (partner, end) if own is self._receives else (end, partner)
        self._check_pair(send.message, receive.message, route)
        send.partner, receive.partner = receive, send
        if not self._crosses(*route):
            if send.delivered:  # it was buffered, and its wait is over
                self._fill(receive, send.expected)
            elif self._shared.delivery is None and self._shared.scheduler.random.random() < 0.5:
                self._deliver(send, receive)
        self._after_crossing(*route, partial(self._complete, send, receive))

    def _complete(self, send: InFlight, receive: InFlight) -> None:
        """Let the waits of both ends return."""
        self._settle(receive.batch, receiving=1)
        if not self._shared.buffered:
            self._settle(send.batch, receiving=0)

    def _crosses(self, source: int, target: int) -> bool:
        """Return True if what one rank says to the other arrives late, since they are on different hosts."""
        return self.hosts[source] != self.hosts[target] and self._shared.delivery is None

    def _after_crossing(self, source: int, target: int, step: Callable[[], None]) -> None:
        """Take the step now, or between hosts once no rank can go on without it."""
        if self._crosses(source, target):
            self._shared.scheduler.postpone(step)
        else:
            step()

    def _settle(self, batch: Batch, receiving: int) -> None:
        """Count one end of a message as complete. receiving: 1 if that end is a receive."""
        batch.open -= 1
        batch.receiving -= receiving
        awaited = batch.receiving if batch.arriving else batch.open
        if not awaited:
            self._wake(batch.rank, batch)

    def _check_pair(self, send: Message, receive: Message, route: tuple[int, int]) -> None:
        if (send.label, send.tensor.dtype, send.bytes) != (receive.label, receive.tensor.dtype, receive.bytes):
            raise MismatchedMessages(
                f"{self.name(route[0])} sends {described(send)} to {self.name(route[1])}, "
                f"which there meets the receive of {described(receive)}"
            )

    def _deliver(self, send: InFlight, receive: InFlight) -> None:
        """Copy the send buffer into the receive buffer, at any time between both posts and the end of either wait."""
        self._check_send(send)
        self._fill(receive, send.expected)
        send.delivered = True

    def _fill(self, receive: InFlight, bits: torch.Tensor) -> None:
        self._check_receive(receive)
        receive.bits.copy_(bits)
        receive.expected, receive.delivered = bits, True

    def receive(self, batch: Batch) -> None:
        """Fill the remaining receive buffers; from now on the rank may read them."""
        for end in batch.receives:
            if not end.delivered:
                assert end.partner is not None
                self._deliver(end.partner, end)
            self._check_receive(end)
        batch.received = True

    def finish(self, batch: Batch) -> None:
        """End a wait: deliver the remaining messages; from now on the rank owns the buffers again."""
        if not batch.received:
            self.receive(batch)
        for end in batch.sends:
            self._check_send(end)
            if not end.delivered and end.partner is not None and not self._held_back(end):
                self._deliver(end, end.partner)
            end.delivered = True  # or buffered: `expected` is then the copy for its receive
        batch.over = True
        for end in (*batch.sends, *batch.receives):
            end.release()

    def _held_back(self, send: InFlight) -> bool:
        delivery, receive = self._shared.delivery, send.partner
        assert receive is not None
        if delivery is None:  # fill a receive buffer at its own wait alone if the message crosses hosts
            return self._crosses(send.batch.rank, receive.batch.rank)
        return delivery.holds_back(receive.message, receive.batch.rank)

    def _check_send(self, end: InFlight) -> None:
        if not end.batch.over and not end.intact:
            raise BrokenContract(
                f"{self.name(end.batch.rank)} changed the send buffer of {described(end.message)} "
                f"to {self.name(end.message.peer)} before its wait was over"
            )

    def _check_receive(self, end: InFlight) -> None:
        if not end.intact:
            raise BrokenContract(
                f"{self.name(end.batch.rank)} wrote to the receive buffer of {described(end.message)} "
                f"from {self.name(end.message.peer)} before its wait was over"
            )

    # --- all ranks together -------------------------------------------------------------------------------------------

    def collective(self, rank: int, number: int, kind: str, payload: bytes) -> list[bytes]:
        """Make the number-th collective call of this rank; return every rank's payload once all have called."""
        if number == len(self._collectives):
            self._collectives.append(Collective(kind, len(payload), [None] * self.size))
        collective = self._collectives[number]
        if (kind, len(payload)) != (collective.kind, collective.length):
            raise MismatchedMessages(
                f"{self.name(rank)} calls {kind} with {len(payload)} bytes where others call {collective.kind} "
                f"with {collective.length}"
            )
        collective.payloads[rank] = payload
        if None in collective.payloads:
            self.wait_for(rank, collective)
        else:
            for other in range(self.size):
                self._after_crossing(rank, other, partial(self._wake, other, collective))
        return [payload for payload in collective.payloads if payload is not None]

    def await_receives(self, batch: Batch) -> None:
        """Wait until all messages that the batch receives have been sent."""
        batch.arriving = True
        if batch.receiving:
            self.wait_for(batch.rank, batch)
        batch.arriving = False

    def wait_for(self, rank: int, reason: Batch | Collective) -> None:
        """Block the rank until the batch or collective is complete."""
        number = self.members[rank]
        self._shared.waiting[number] = self, reason
        self._shared.scheduler.block(number)
        del self._shared.waiting[number]

    def _wake(self, rank: int, reason: Batch | Collective) -> None:
        number = self.members[rank]
        if self._shared.waiting.get(number) == (self, reason):
            self._shared.scheduler.wake(number)

    def awaited(self, reason: Batch | Collective) -> list[tuple[int, str]]:
        """List the ranks that a blocked rank waits for: (number in the simulation, text with the missing step)."""
        if isinstance(reason, Collective):
            missing = [other for other, payload in enumerate(reason.payloads) if payload is None]
            return [(self.members[other], f"{self.name(other)} to call {reason.kind}") for other in missing]
        steps, sends = [], [] if self._shared.buffered or reason.arriving else reason.sends
        for ends, verb in ((reason.receives, "send"), (sends, "receive")):
            for end in ends:
                if end.partner is None:
                    peer = end.message.peer
                    steps.append((self.members[peer], f"{self.name(peer)} to {verb} {described(end.message)}"))
        return steps


@dataclass(eq=False)
class Collective:
    """One collective call of all ranks. payloads: None for a rank that has not called yet."""

    kind: str
    length: int
    payloads: list[bytes | None]
