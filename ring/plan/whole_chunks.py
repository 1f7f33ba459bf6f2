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
    if layout.runs is not None:
        shards = [(rank, run) for rank in range(layout.world_size) for run in layout.shard_runs(rank)]
        if all(run.step == 1 or run.length == 1 for _, run in shards):
            table = np.array([(rank, run.start, run.length) for rank, run in shards], np.int64).reshape(-1, 3)
            rank, start, length = table.T
            first_of_shard = np.array(layout.cuts[:-1], np.int64)[rank]
            return np.stack((rank, np.cumsum(length) - length - first_of_shard, start, np.ones_like(start), length), 1)
    order, cuts = layout.order, np.array(layout.cuts[1:-1], np.int64)
    leads = np.ones(len(order), bool)
    leads[1:] = np.diff(order) != 1
    leads[cuts[cuts < len(order)]] = True
    at = np.flatnonzero(leads)
    rank = np.searchsorted(layout.cuts, at, side="right") - 1
    length = np.diff(np.append(at, len(order)))
    return np.stack((rank, at - np.array(layout.cuts, np.int64)[rank], order[at], np.ones_like(at), length), 1)


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
