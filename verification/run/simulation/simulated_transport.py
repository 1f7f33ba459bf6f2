"""`ring.comm.transport.Transport` of a simulated rank: checks what the rank does, and asks the simulation for the
rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ring.comm.transport import Message, Outgoing, OwnBuffers, Pending
from verification.failures import BrokenContract
from verification.run.simulation.announced import Announced
from verification.run.simulation.in_flight import Batch, described, overlap, span

if TYPE_CHECKING:
    from verification.run.simulation.simulation import Simulation


class SimulatedTransport(OwnBuffers):
    """Of one rank."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank, self.world_size = rank, simulation.size
        self._simulation = simulation
        self._batches: list[Batch] = []  # not waited for yet
        self._posted = 0
        self._meetings = 0
        self._calls = 0
        self._told: dict[Hashable, list[Outgoing]] = {}
        self._announced: Announced | None = None

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        simulation = self._simulation
        simulation.scheduler.pause(self.rank)
        if self._calls == len(simulation.calls):
            simulation.calls.append(key)
        if simulation.calls[self._calls] != key:
            raise BrokenContract(f"{simulation.name(self.rank)} prepares another kind of call than others do")
        self._calls += 1
        if key not in self._told:  # else the first call of the kind told, and is held against this one too
            self._told[key] = outgoing()
        self._announced = Announced(simulation.name(self.rank), self._told[key])

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = super().empty(name, shape, dtype, device)
        if self._announced is not None:
            self._announced.made(name, buffer)
        return buffer

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        simulation = self._simulation
        simulation.scheduler.pause(self.rank)
        batch = Batch(self._posted, self.rank)
        self._posted += 1
        self._check(sends, receives)
        if self._announced is not None:
            self._announced.keep(sends)
        self._batches.append(batch)
        simulation.launch(batch, sends, receives)
        return _Handle(self, batch)

    def arrive(self, batch: Batch) -> None:
        if batch.landed:
            return
        simulation = self._simulation
        simulation.scheduler.pause(self.rank)
        batch.arriving = True
        if batch.landing:
            simulation.wait_for(self.rank, batch)
        batch.arriving = False
        simulation.land(batch)

    def wait(self, batch: Batch) -> None:
        if batch.over:
            return
        simulation = self._simulation
        simulation.scheduler.pause(self.rank)
        if batch.open:
            simulation.wait_for(self.rank, batch)
        simulation.finish(batch)
        self._batches.remove(batch)

    def all_equal(self, payload: bytes) -> bool:
        if len(payload) % 8:
            raise ValueError(f"payload must be a multiple of 8 bytes, got {len(payload)}")
        return len(set(self._meet("all_equal", payload))) == 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._meet("all_gather", payload)

    def check_all_waited(self) -> None:
        """BrokenContract if this rank ends with a batch that it posted and never waited for."""
        simulation = self._simulation
        if self._batches:
            batch = self._batches[0]
            what = [f"send of {described(f.message)} to {simulation.name(f.message.peer)}" for f in batch.sends]
            what += [
                f"receive of {described(f.message)} from {simulation.name(f.message.peer)}" for f in batch.receives
            ]
            raise BrokenContract(
                f"{simulation.name(self.rank)} never waited for batch {batch.number}: {', '.join(what) or 'empty'}"
            )

    def _meet(self, kind: str, payload: bytes) -> list[bytes]:
        self._simulation.scheduler.pause(self.rank)
        self._meetings += 1
        return self._simulation.join(self.rank, self._meetings - 1, kind, payload)

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
        """A buffer that is received into shares no byte with any other in flight. Before any is scribbled over."""
        into = [(*span(m), m.label) for m in receives]
        out = [(*span(m), m.label) for m in sends]
        for batch in self._batches:
            into += [(f.start, f.stop, f.message.label) for f in batch.receives if not batch.landed]
            out += [(f.start, f.stop, f.message.label) for f in batch.sends]
        shared = overlap(into, out)
        if shared is not None:
            raise BrokenContract(
                f"{self._simulation.name(self.rank)} shares bytes between the buffers of {shared[0]} and {shared[1]}, "
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
