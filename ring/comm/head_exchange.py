"""Exchanges rows of all heads for heads of all rows, stage by stage, and back: the all-to-all of DeepSpeed-Ulysses
(arXiv 2309.14509). It knows nothing of attention.

A rank sends each other rank the heads of its rows that this one computes, and receives the rows of the others with its
own heads. Messages of the next stage are in flight while a stage is computed, and so are the results of the one before.
A slot is one row of one head, batch times head dim numbers; a message is a row of slots, row by row.

A tensor has two buffers: by owner, with the own rows of the other ranks' heads; by head, with all rows of the own
heads, in the order of the ranks. A block may have another order.

If ranks write into each other's memory (`OneSidedTransport.put`), nothing is packed: a tensor has only the buffer in
which it arrives: by head, in the order of the block; by owner, with the heads of all ranks side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ring.comm import buffer_meter
from ring.comm.transport import Message, OneSidedTransport, Outgoing, Pending, Put, Target, Transport, one_sided
from ring.plan.head_rows import Places
from ring.plan.head_shares import HeadBlock
from ring.strided_view import copy

Compute = Callable[[int, list[torch.Tensor]], Sequence[torch.Tensor]]
Given = Sequence[tuple["Rows", torch.Tensor]]
Empty = Callable[[str, Sequence[int], torch.dtype, torch.device], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """A tensor to exchange, by its label. places: where the rows of each rank lie in a block; of_keys: it has key/value
    heads; summed: several blocks may have results of a head.
    """

    label: str
    places: Places
    of_keys: bool
    summed: bool = False

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(map(len, places)) for places in self.places)

    @cached_property
    def spans(self) -> list[tuple[range, slice]]:
        """Rows of a block, and the same in the order of the ranks."""
        places = [place for of_rank in self.places for place in of_rank]
        edges = list(accumulate(map(len, places), initial=0))
        return [(place, slice(*span)) for place, *span in zip(places, edges[:-1], edges[1:], strict=True)]

    @cached_property
    def by_rank(self) -> bool:
        """True if a block has the rows in the order of the ranks."""
        return all((rows.start, rows.stop, rows.step) == (at.start, at.stop, 1) for rows, at in self.spans if rows)

    def heads(self, block: HeadBlock) -> range:
        return block.keys if self.of_keys else block.queries


class HeadExchange:
    """The messages of one call. ranks: those of the transport's group that divide the heads. stages: the block of each
    of them, stage by stage.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], stages: Sequence[Sequence[HeadBlock]]) -> None:
        self._transport, self._ranks, self._stages = transport, ranks, stages
        self._place = ranks.index(transport.rank)
        self._allocated = 0

    def run(
        self, key: Hashable, given: Given, wanted: Given, compute: Compute, within: Callable[[], list[Outgoing]]
    ) -> None:
        """Compute all stages, and write the results of the own rows to the tensors wanted.

        Args:
            key: the kind of call, the same on every rank of the transport's group.
            given: tensors of the own rows, (B, own rows, heads, D).
            wanted: the same for results. Summed ones are added to them.
            compute: computes a stage, given its number and (B, rows, heads of the block, D) of each tensor given;
                returns the same of each tensor wanted. Not called in a stage without heads.
            within: lists the messages that `compute` will send, of all stages.
        """
        self._transport.prepare(key, lambda: [*self._outgoing(given, wanted), *within()])
        with self._counted():
            inward, outward = self._carriers(given, wanted, self._allocate)
            pending, returning = self._scatter(inward[0], given, 0), None
            for stage in range(len(self._stages)):
                following = None
                if stage + 1 < len(self._stages):
                    following = self._scatter(inward[(stage + 1) % 2], given, stage + 1)
                pending.wait()
                results: Sequence[torch.Tensor] = ()
                if self._stages[stage][self._place].queries:
                    results = compute(stage, [carrier.in_block(stage) for carrier in inward[stage % 2]])
                if returning is not None:
                    self._collect(outward, wanted, stage - 1, returning)
                returning = self._return(outward, results, stage)
                if following is not None:
                    pending = following
            assert returning is not None
            self._collect(outward, wanted, len(self._stages) - 1, returning)

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy what a stage was given, from buffers that are used again, to keep it for the backward."""
        copies = [x.clone() for x in tensors]
        self.hold(copies)
        return copies

    def hold(self, kept: Sequence[torch.Tensor]) -> None:
        """Count tensors that are kept among the buffers of the call."""
        for x in kept:
            self._count(x)

    def _scatter(self, carriers: Sequence[_Carrier], given: Given, stage: int) -> Pending:
        if one_sided(self._transport):
            return self._put(self._transport, carriers, [x for _, x in given], stage, at_owner=False)
        sends, receives = [], []
        for carrier, (_, x) in zip(carriers, given, strict=True):
            for heads, part in carrier.by_owner(stage):
                copy(part, x[:, :, heads.start : heads.stop])
            sends += carrier.messages(stage, at_owner=True)
            receives += carrier.messages(stage, at_owner=False)
        return self._transport.post(sends, receives)

    def _put(
        self, transport: OneSidedTransport, carriers: Sequence[_Carrier], tensors: Sequence[torch.Tensor], stage: int,
        at_owner: bool,
    ) -> Pending:  # fmt: skip
        """Write tensors into the buffers by owner, or by head, of all ranks."""
        puts = []
        for carrier, x in zip(carriers, tensors, strict=False):  # no results in a stage without heads
            assert isinstance(carrier, _PutCarrier)
            puts.append(carrier.put(stage, x, at_owner))
        receives = [message for carrier in carriers for message in carrier.messages(stage, at_owner)]
        return transport.put([put for put in puts if put.targets], receives)

    def _return(self, carriers: Sequence[_Carrier], results: Sequence[torch.Tensor], stage: int) -> Pending:
        if one_sided(self._transport):
            return self._put(self._transport, carriers, results, stage, at_owner=True)
        for carrier, result in zip(carriers, results, strict=False):  # no results in a stage without heads
            by_head = carrier.by_head(stage)
            for rows, at in carrier.rows.spans:
                copy(by_head[:, at], result[:, rows.start : rows.stop : rows.step])
        sends = [message for carrier in carriers for message in carrier.messages(stage, at_owner=False)]
        receives = [message for carrier in carriers for message in carrier.messages(stage, at_owner=True)]
        return self._transport.post(sends, receives)

    def _collect(self, carriers: Sequence[_Carrier], wanted: Given, stage: int, pending: Pending) -> None:
        pending.wait()
        for carrier, (rows, result) in zip(carriers, wanted, strict=True):
            for heads, part in carrier.by_owner(stage):
                own = result[:, :, heads.start : heads.stop]
                own.add_(part) if rows.summed else copy(own, part)

    def _outgoing(self, given: Given, wanted: Given) -> list[Outgoing]:
        """List all messages between ranks that divide the heads, as `_scatter` and `_return` post them; for puts those
        that are received.
        """
        inward, outward = self._carriers(given, wanted, _without_memory)
        outgoing, received = [], one_sided(self._transport)
        for stage in range(len(self._stages)):
            for carriers, at_owner in ((inward[stage % 2], not received), (outward, received)):
                outgoing += [message for carrier in carriers for message in carrier.announced(stage, at_owner)]
        return outgoing

    def _carriers(self, given: Given, wanted: Given, empty: Empty) -> tuple[list[list[_Carrier]], list[_Carrier]]:
        """Allocate the buffers of the tensors given, for one stage or by turns for two, and of those wanted."""
        sides = range(min(2, len(self._stages)))
        inward = [[self._carrier(rows, x, f" {side}", empty, True) for rows, x in given] for side in sides]
        return inward, [self._carrier(rows, x, "", empty, False) for rows, x in wanted]

    def _carrier(self, rows: Rows, x: torch.Tensor, side: str, empty: Empty, inward: bool) -> _Carrier:
        """Allocate both buffers of a tensor; for puts, an empty one in place of that from which it is not sent."""
        place, kind, put = self._place, (x.shape[0], x.shape[3]), one_sided(self._transport)
        widths = [[len(rows.heads(block)) for block in stage] for stage in self._stages]
        at_owner = rows.counts[place] * max(sum(stage) - (0 if put else stage[place]) for stage in widths)
        at_head = sum(rows.counts) * max(stage[place] for stage in widths)
        if put:
            at_owner, at_head = (0, at_head) if inward else (at_owner, 0)
        buffers = []
        for end, slots in (("owner", at_owner), ("head", at_head)):
            name = f"{rows.label} by {end}{side}"
            buffers.append(_Buffer(name, empty(name, (slots, kind[0] * kind[1]), x.dtype, x.device)))
        return (_PutCarrier if put else _Carrier)(rows, self._ranks, place, self._stages, kind, *buffers)

    def _allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = self._transport.empty(name, shape, dtype, device)
        self._count(buffer)
        return buffer

    def _count(self, tensor: torch.Tensor) -> None:
        self._allocated += tensor.nbytes
        buffer_meter.count(self._transport, tensor.nbytes)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        finally:
            buffer_meter.count(self._transport, -self._allocated)
            self._allocated = 0


class _Buffer(NamedTuple):
    """A buffer, (slots, numbers of a slot), and its name."""

    name: str
    memory: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Carrier:
    """Both buffers of a tensor. place: of the own rank in ranks. kind: batch and head dim."""

    rows: Rows
    ranks: Sequence[int]
    place: int
    stages: Sequence[Sequence[HeadBlock]]
    kind: tuple[int, int]
    of_owner: _Buffer
    of_head: _Buffer

    def by_head(self, stage: int) -> torch.Tensor:
        """All rows of the own heads, (B, rows, heads, D): a view."""
        return self._view(self.of_head, 0, sum(self.rows.counts), len(self._heads(stage, self.place)))

    def in_block(self, stage: int) -> torch.Tensor:
        """The same in the order of the block: a view, or a copy."""
        by_head = self.by_head(stage)
        if self.rows.by_rank:
            return by_head
        block = torch.empty_like(by_head)
        for rows, at in self.rows.spans:
            copy(block[:, rows.start : rows.stop : rows.step], by_head[:, at])
        return block

    def by_owner(self, stage: int) -> Iterator[tuple[range, torch.Tensor]]:
        """Iterate over the heads of every rank and the own rows of them, (B, own rows, heads, D): views."""
        own = self.rows.counts[self.place]
        for peer, start, _ in self._at_owner(stage):
            heads = self._heads(stage, peer)
            yield heads, self._view(self.of_owner, start, own, len(heads))
        before = sum(self.rows.counts[: self.place])
        yield self._heads(stage, self.place), self.by_head(stage)[:, before : before + own]

    def messages(self, stage: int, at_owner: bool) -> list[Message]:
        """Messages with the other ranks, from or to the buffer by owner, or by head."""
        buffer, parts = (self.of_owner, self._at_owner) if at_owner else (self.of_head, self._at_head)
        ranks, label = self.ranks, f"{self.rows.label} {stage + 1}"
        return [Message(ranks[peer], buffer.memory, label, *span) for peer, *span in parts(stage) if span[0] < span[1]]

    def announced(self, stage: int, at_owner: bool) -> list[Outgoing]:
        """List the messages, if they are sent; for puts, received."""
        buffer = self.of_owner if at_owner else self.of_head
        return [message.announced(buffer.name) for message in self.messages(stage, at_owner)]

    def _at_owner(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (peer, first slot, end)."""
        own = self.rows.counts[self.place]
        peers = [peer for peer in range(len(self.rows.counts)) if peer != self.place]
        edges = accumulate((own * len(self._heads(stage, peer)) for peer in peers), initial=0)
        yield from _spans(peers, list(edges))

    def _at_head(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (peer, first slot, end)."""
        width = len(self._heads(stage, self.place))
        edges = list(accumulate((count * width for count in self.rows.counts), initial=0))
        yield from (span for span in _spans(range(len(self.rows.counts)), edges) if span[0] != self.place)

    def _heads(self, stage: int, rank: int) -> range:
        return self.rows.heads(self.stages[stage][rank])

    def _view(self, buffer: _Buffer, start: int, rows: int, heads: int) -> torch.Tensor:
        batch, dim = self.kind
        return buffer.memory[start : start + rows * heads].view(rows, heads, batch, dim).permute(2, 0, 1, 3)


class _PutCarrier(_Carrier):
    """The buffer in which a tensor arrives. By head it has the block's order; by owner, a row has all heads."""

    def put(self, stage: int, x: torch.Tensor, at_owner: bool) -> Put:
        """Return the put of a tensor: of the own rows to the buffers by head of all ranks, or of the own heads to those
        by owner.
        """
        widths, buffer = self._widths(stage), self.of_owner if at_owner else self.of_head
        targets = []
        for peer, rank in enumerate(self.ranks):
            places = self.rows.places[peer if at_owner else self.place]
            for place, row in zip(places, accumulate(map(len, places), initial=0), strict=False):
                if at_owner:
                    first = row * sum(widths) + sum(widths[: self.place])
                    targets.append(Target(rank, place, range(widths[self.place]), first, sum(widths)))
                else:
                    rows, first = range(row, row + len(place)), place.start * widths[peer]
                    targets.append(Target(rank, rows, self._heads(stage, peer), first, place.step * widths[peer]))
        targets = [target for target in targets if target.rows and target.heads]
        return Put(f"{self.rows.label} {stage + 1}", x, tuple(targets), buffer.memory)

    def in_block(self, stage: int) -> torch.Tensor:
        return self.by_head(stage)

    def by_owner(self, stage: int) -> Iterator[tuple[range, torch.Tensor]]:
        """Iterate over runs of heads of all ranks, and the own rows of them: views."""
        runs: list[range] = []
        for heads in filter(len, (self._heads(stage, peer) for peer in range(len(self.ranks)))):
            first = runs.pop().start if runs and runs[-1].stop == heads.start else heads.start
            runs.append(range(first, heads.stop))
        whole = self._view(self.of_owner, 0, self.rows.counts[self.place], sum(map(len, runs)))
        for heads, first in zip(runs, accumulate(map(len, runs), initial=0), strict=False):
            yield heads, whole[:, :, first : first + len(heads)]

    def _at_owner(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (peer, first slot, end): as many slots from the front as a peer writes, wherever they are."""
        own = self.rows.counts[self.place]
        yield from ((peer, 0, own * width) for peer, width in enumerate(self._widths(stage)) if peer != self.place)

    def _at_head(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """See `_at_owner`."""
        width = len(self._heads(stage, self.place))
        yield from ((peer, 0, count * width) for peer, count in enumerate(self.rows.counts) if peer != self.place)

    def _widths(self, stage: int) -> list[int]:
        return [len(self._heads(stage, peer)) for peer in range(len(self.ranks))]


def _without_memory(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _spans(peers: Sequence[int], edges: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(peers, edges[:-1], edges[1:], strict=True)
