"""Chunks of a rank: where they lie in its shard, and their numbers in the sequence.

Every operation on tokens is computed for one chunk of one sequence by itself, so that its bits depend on no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.documents import Documents
from ring.layout import Layout
from ring.nn.context import ContextParallel
from ring.plan.pieces import DocumentTable
from ring.plan.whole_chunks import straight_runs
from ring.validation import refuse_cut_chunks

ALIGNMENT = 512  # bytes; that of torch's allocator for GPUs


@dataclass(frozen=True)
class ChunkRows:
    """The chunks of a sequence that a rank holds.

    Args:
        rows: (begin, end) of each in the shard, ascending.
        numbers: their numbers in the sequence, chunks of all documents counted through.
        count: chunks of the whole sequence.
        tokens: on the rank.
    """

    rows: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    count: int
    tokens: int

    @classmethod
    def of(cls, layout: Layout, documents: Documents | None, chunk: int, rank: int) -> ChunkRows:
        """Return the chunks of a layout that holds whole ones."""
        table = DocumentTable.of(documents, layout.n).cut(chunk)
        found: list[tuple[tuple[int, int], int]] = []
        for owner, row, start, _, length in straight_runs(layout).tolist():
            if owner != rank or not length:
                continue
            first, last = table.holding(np.array((start, start + length - 1)))
            for number in range(int(first), int(last) + 1):
                begin = row + int(table.begin[number]) - start
                found.append(((begin, begin + int(table.end[number] - table.begin[number])), number))
        found.sort()
        rows, numbers = tuple(one for one, _ in found), tuple(number for _, number in found)
        return cls(rows, numbers, len(table), layout.counts[rank])


def chunks_of_ranks(context: ContextParallel) -> list[ChunkRows]:
    """Return the chunks of every rank of a handle with `same_bits`. Raises ValueError for a layout that cuts them."""
    chunk, layout, documents = context.same_bits, context.layout, context.documents
    assert chunk is not None

    def found() -> list[ChunkRows]:
        refuse_cut_chunks("layout", layout, documents, chunk)
        return [ChunkRows.of(layout, documents, chunk, rank) for rank in range(context.world_size)]

    return context.cached("chunks of ranks", found)


class Cut(torch.autograd.Function):
    """Pieces (1, rows, ...) of x (B, N, ...), entry by entry, chunk by chunk: each as if it were allocated alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: ChunkRows) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.shape = chunks, x.shape
        return tuple(_alone(x[b : b + 1, begin:end]) for b in range(len(x)) for begin, end in chunks.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return joined(grads, ctx.chunks, ctx.shape[0]), None


class Join(torch.autograd.Function):
    """The tensor (B, N, ...) of its pieces."""

    @staticmethod
    def forward(ctx: Any, chunks: ChunkRows, batch: int, *pieces: Tensor) -> Tensor:
        ctx.chunks = chunks
        return joined(pieces, chunks, batch)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows = ctx.chunks.rows
        return (None, None, *(_alone(grad[b : b + 1, begin:end]) for b in range(len(grad)) for begin, end in rows))


def joined(pieces: tuple[Tensor, ...], chunks: ChunkRows, batch: int) -> Tensor:
    """Return the pieces as one tensor (B, N, ...), a new one: a model may change what a module returns."""
    per = len(chunks.rows)
    if per == 1:
        return torch.cat(pieces)
    entries = [torch.cat(pieces[b * per : (b + 1) * per], 1) for b in range(batch)]
    return entries[0] if batch == 1 else torch.cat(entries)


def _alone(piece: Tensor) -> Tensor:
    """Return a piece that lies in memory as if it were allocated: bits of a matrix product may depend on that."""
    # Not by the address on CPUs: a recomputation must make the same operations at another one.
    if piece.is_cuda and piece.is_contiguous() and piece.data_ptr() % ALIGNMENT == 0:
        return piece.view_as(piece)
    return piece.clone(memory_format=torch.contiguous_format)
