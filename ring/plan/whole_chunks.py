"""Layouts of whole chunks, as `same_bits` needs them: every chunk of a document lies on one rank, in order.

A chunk is `chunk` tokens of a document, counted from its begin; the last one may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ring.layout import Layout
from ring.plan.pieces import DocumentTable, Ints

STEP = 16  # a chunk is a multiple of it, so that matrix products of whole chunks have sizes that BLAS prefers
STEP_ON_GPUS = 128  # rows or keys of a tile of the fused kernels


def straight_runs(layout: Layout) -> Ints:
    """Return the longest runs of consecutive tokens of all ranks, (runs, 5): rank, row, start, step 1, length."""
    runs = [(rank, *run) for rank in range(layout.world_size) for run in layout.shard_runs(rank)] if layout.runs else []
    if layout.runs is not None and all(step == 1 or length == 1 for _, _, step, length in runs):
        rank, start, _, length = np.array(runs, np.int64).reshape(-1, 4).T
    else:
        start, length = layout.order, np.ones(layout.n, np.int64)
        rank = np.repeat(np.arange(layout.world_size), layout.counts)
    leads = np.ones(len(start), bool)
    leads[1:] = (rank[1:] != rank[:-1]) | (start[1:] != start[:-1] + length[:-1])
    at, row = np.flatnonzero(leads), np.cumsum(length) - length - np.array(layout.cuts, np.int64)[rank]
    total = np.add.reduceat(length, at) if len(at) else length
    return np.stack((rank[at], row[at], start[at], np.ones_like(at), total), 1)


def cut_chunk(layout: Layout, documents: Sequence[int] | None, chunk: int) -> tuple[int, int] | None:
    """Return the rank and the position of the first token that is not where a layout of whole chunks has it: at the
    begin of a chunk or behind its predecessor, up to the end of the chunk; None: all are.
    """
    rank, _, start, _, length = straight_runs(layout).T
    chunks = DocumentTable.of(documents, layout.n).cut(chunk)
    stop = start + length
    begins, ends = chunks.begin[chunks.holding(start)] == start, chunks.end[chunks.holding(stop - 1)] == stop
    wrong = np.flatnonzero(~(begins & ends))
    if not len(wrong):
        return None
    at = wrong[0]
    return int(rank[at]), int(start[at] if not begins[at] else stop[at])
