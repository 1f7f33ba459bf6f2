"""Exchanges rows of all heads for heads of all rows, stage by stage, and back: the all-to-all of DeepSpeed-Ulysses
(arXiv 2309.14509). It knows nothing of attention.

A rank sends each other rank the heads of its rows that this one computes, and receives the rows of the others with its
own heads. Messages of the next stage are in flight while a stage is computed, and so are the results of the one before.
A slot is one row of one head, batch times head dim numbers; a message is a row of slots, row by row.

A tensor has two buffers: by owner, with the own rows of the other ranks' heads; by head, with all rows of the own
heads, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch

from ring.comm import buffer_meter
from ring.comm.transport import Message, Pending, Transport
from ring.plan.head_shares import HeadBlock

Compute = Callable[[int, list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Rows:
    """A tensor to exchange, by its label. counts: rows of each rank; of_keys: it has key/value heads."""

    label: str
    counts: tuple[int, ...]
    of_keys: bool

    def heads(self, block: HeadBlock) -> range:
        return block.keys if self.of_keys else block.queries


class HeadExchange:
    """The messages of one call. stages: the block of every rank, stage by stage."""

    def __init__(self, transport: Transport, stages: Sequence[Sequence[HeadBlock]]) -> None:
        self._transport, self._stages = transport, stages
        self._allocated = 0

    def run(
        self, given: Sequence[tuple[Rows, torch.Tensor]], wanted: Sequence[tuple[Rows, torch.Tensor]], compute: Compute
    ) -> None:
        """Compute all stages, and write the results of the own rows to the tensors wanted.

        Args:
            given: tensors of the own rows, (B, own rows, heads, D).
            wanted: the same for results. Those of key/value heads, which several ranks may compute, are added.
            compute: computes a stage, given its number and (B, rows, heads of the block, D) of each tensor given;
                returns the same of each tensor wanted. Not called in a stage without heads.
        """
        with self._counted():
            sides = min(2, len(self._stages))
            inward = [[self._carrier(rows, x) for rows, x in given] for _ in range(sides)]
            outward = [self._carrier(rows, x) for rows, x in wanted]
            pending, returning = self._scatter(inward[0], given, 0), None
            for stage in range(len(self._stages)):
                following = None
                if stage + 1 < len(self._stages):
                    following = self._scatter(inward[(stage + 1) % 2], given, stage + 1)
                pending.wait()
                results: Sequence[torch.Tensor] = ()
                if self._stages[stage][self._transport.rank].queries:
                    results = compute(stage, [carrier.by_head(stage) for carrier in inward[stage % 2]])
                if returning is not None:
                    self._collect(outward, wanted, stage - 1, returning)
                returning = self._return(outward, results, stage)
                if following is not None:
                    pending = following
            assert returning is not None
            self._collect(outward, wanted, len(self._stages) - 1, returning)

    def _scatter(self, carriers: Sequence[_Carrier], given: Sequence[tuple[Rows, torch.Tensor]], stage: int) -> Pending:
        sends, receives = [], []
        for carrier, (_, x) in zip(carriers, given, strict=True):
            for heads, part in carrier.by_owner(stage):
                part.copy_(x[:, :, heads.start : heads.stop])
            sends += carrier.messages(stage, at_owner=True)
            receives += carrier.messages(stage, at_owner=False)
        return self._transport.post(sends, receives)

    def _return(self, carriers: Sequence[_Carrier], results: Sequence[torch.Tensor], stage: int) -> Pending:
        for carrier, result in zip(carriers, results, strict=False):  # no results in a stage without heads
            carrier.by_head(stage).copy_(result)
        sends = [message for carrier in carriers for message in carrier.messages(stage, at_owner=False)]
        receives = [message for carrier in carriers for message in carrier.messages(stage, at_owner=True)]
        return self._transport.post(sends, receives)

    def _collect(
        self, carriers: Sequence[_Carrier], wanted: Sequence[tuple[Rows, torch.Tensor]], stage: int, pending: Pending
    ) -> None:
        pending.wait()
        for carrier, (rows, result) in zip(carriers, wanted, strict=True):
            for heads, part in carrier.by_owner(stage):
                own = result[:, :, heads.start : heads.stop]
                own.add_(part) if rows.of_keys else own.copy_(part)

    def _carrier(self, rows: Rows, x: torch.Tensor) -> _Carrier:
        """Allocate both buffers of a tensor."""
        rank, kind = self._transport.rank, (x.shape[0], x.shape[3])
        widths = [[len(rows.heads(block)) for block in stage] for stage in self._stages]
        at_owner = rows.counts[rank] * max(sum(stage) - stage[rank] for stage in widths)
        at_head = sum(rows.counts) * max(stage[rank] for stage in widths)
        buffers = []
        for side, slots in (("by owner", at_owner), ("by head", at_head)):
            buffer = self._transport.empty(f"{rows.label} {side}", (slots, kind[0] * kind[1]), x.dtype, x.device)
            self._allocated += buffer.nbytes
            buffer_meter.count(self._transport, buffer.nbytes)
            buffers.append(buffer)
        return _Carrier(rows, rank, self._stages, kind, *buffers)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        finally:
            buffer_meter.count(self._transport, -self._allocated)
            self._allocated = 0


@dataclass(frozen=True, eq=False)
class _Carrier:
    """Both buffers of a tensor, (slots, numbers of a slot). kind: batch and head dim."""

    rows: Rows
    rank: int
    stages: Sequence[Sequence[HeadBlock]]
    kind: tuple[int, int]
    of_owner: torch.Tensor
    of_head: torch.Tensor

    def by_head(self, stage: int) -> torch.Tensor:
        """All rows of the own heads, (B, rows, heads, D): a view."""
        return self._view(self.of_head, 0, sum(self.rows.counts), len(self._heads(stage, self.rank)))

    def by_owner(self, stage: int) -> Iterator[tuple[range, torch.Tensor]]:
        """Iterate over the heads of every rank and the own rows of them, (B, own rows, heads, D): views."""
        own = self.rows.counts[self.rank]
        for peer, start, _ in self._at_owner(stage):
            heads = self._heads(stage, peer)
            yield heads, self._view(self.of_owner, start, own, len(heads))
        before = sum(self.rows.counts[: self.rank])
        yield self._heads(stage, self.rank), self.by_head(stage)[:, before : before + own]

    def messages(self, stage: int, at_owner: bool) -> list[Message]:
        """Messages with the other ranks, from or to the buffer by owner, or by head."""
        buffer, parts = (self.of_owner, self._at_owner) if at_owner else (self.of_head, self._at_head)
        label = f"{self.rows.label} {stage + 1}"
        return [Message(peer, buffer, label, start, stop) for peer, start, stop in parts(stage) if start < stop]

    def _at_owner(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (peer, first slot, end)."""
        own = self.rows.counts[self.rank]
        peers = [peer for peer in range(len(self.rows.counts)) if peer != self.rank]
        edges = accumulate((own * len(self._heads(stage, peer)) for peer in peers), initial=0)
        yield from _spans(peers, list(edges))

    def _at_head(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over (peer, first slot, end)."""
        width = len(self._heads(stage, self.rank))
        edges = list(accumulate((count * width for count in self.rows.counts), initial=0))
        yield from (span for span in _spans(range(len(self.rows.counts)), edges) if span[0] != self.rank)

    def _heads(self, stage: int, rank: int) -> range:
        return self.rows.heads(self.stages[stage][rank])

    def _view(self, buffer: torch.Tensor, start: int, rows: int, heads: int) -> torch.Tensor:
        batch, dim = self.kind
        return buffer[start : start + rows * heads].view(rows, heads, batch, dim).permute(2, 0, 1, 3)


def _spans(peers: Sequence[int], edges: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(peers, edges[:-1], edges[1:], strict=True)
