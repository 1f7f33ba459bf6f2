"""`ring.comm.transport.Transport` of a simulated rank: checks what the rank does; the network does the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ring.comm.calls import Calls
from ring.comm.transport import Message, Outgoing, OwnBuffers, Pending
from verification.failures import BrokenContract
from verification.run.simulation.announced import Announced
from verification.run.simulation.in_flight import Batch, described, overlap, span


class Network(Protocol):
    """What joins the simulated ranks of a group: its `Wires`. size: how many they are."""

    size: int

    def name(self, rank: int) -> str:
        """What the rank is called in reports."""

    def pause(self, rank: int) -> None:
        """Perhaps other ranks go on first."""

    def check_call(self, rank: int, number: int, key: Hashable) -> None:
        """Raises BrokenContract unless the number-th call of this rank is of the same kind as the others'."""

    def launch(self, batch: Batch, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Start a batch that the rank has posted."""

    def wait_for(self, rank: int, reason: Batch) -> None:
        """Return once what the rank waits for has happened."""

    def receive(self, batch: Batch) -> None:
        """The rank has its receive buffers back."""

    def finish(self, batch: Batch) -> None:
        """The rank has all its buffers back."""

    def collective(self, rank: int, number: int, kind: str, payload: bytes) -> list[bytes]:
        """What every rank gave; returns once all have called."""

    def subgroup(self, ranks: Sequence[int]) -> Sequence[SimulatedTransport]:
        """The transports of a group of these ranks, the same one whenever it is asked for."""


class SimulatedTransport(OwnBuffers):
    """The transport of one rank."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.world_size, self.calls = rank, network.size, Calls()
        self._network = network
        self._batches: list[Batch] = []  # not waited for yet
        self._posted = 0
        self._collectives = 0
        self._calls = 0
        self._outgoing: dict[Hashable, list[Outgoing]] = {}
        self._announced: Announced | None = None

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        network = self._network
        network.pause(self.rank)
        network.check_call(self.rank, self._calls, key)
        self._calls += 1
        if key not in self._outgoing:  # else what the first call of its kind announced holds for this one too
            self._outgoing[key] = outgoing()
        self._announced = Announced(network.name(self.rank), self._outgoing[key])

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().empty(name, shape, dtype, device)
        if self._announced is not None:
            self._announced.made(name, buffer)
        return buffer

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        network = self._network
        network.pause(self.rank)
        batch = Batch(self._posted, self.rank)
        self._posted += 1
        self._check(sends, receives)
        if self._announced is not None:
            self._announced.keep(sends)
        self._batches.append(batch)
        network.launch(batch, sends, receives)
        return _Handle(self, batch)

    def arrive(self, batch: Batch) -> None:
        if batch.received:
            return
        network = self._network
        network.pause(self.rank)
        batch.arriving = True
        if batch.receiving:
            network.wait_for(self.rank, batch)
        batch.arriving = False
        network.receive(batch)

    def wait(self, batch: Batch) -> None:
        if batch.over:
            return
        network = self._network
        network.pause(self.rank)
        if batch.open:
            network.wait_for(self.rank, batch)
        network.finish(batch)
        self._batches.remove(batch)

    def all_equal(self, payload: bytes) -> bool:
        if len(payload) % 8:
            raise ValueError(f"payload must be a multiple of 8 bytes, got {len(payload)}")
        return len(set(self._collective("all_equal", payload))) == 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._collective("all_gather", payload)

    def subgroup(self, ranks: Sequence[int]) -> SimulatedTransport | None:
        """The transport of a group of some ranks of this one; None on all others."""
        transports = self._network.subgroup(ranks)
        return transports[list(ranks).index(self.rank)] if self.rank in ranks else None

    def check_all_waited(self) -> None:
        """BrokenContract if this rank ends with a batch that it posted and never waited for."""
        network = self._network
        if self._batches:
            batch = self._batches[0]
            what = [f"send of {described(f.message)} to {network.name(f.message.peer)}" for f in batch.sends]
            what += [f"receive of {described(f.message)} from {network.name(f.message.peer)}" for f in batch.receives]
            raise BrokenContract(
                f"{network.name(self.rank)} never waited for batch {batch.number}: {', '.join(what) or 'empty'}"
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
        self._check_disjoint(sends, receives)

    def _check_disjoint(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """A buffer that is received into shares no byte with any other in flight. Called before any is overwritten."""
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
