"""The arguments of the implementation for a Case: the `Layout`, and inputs that are not contiguous."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from reference import shards
from ring import Layout
from verification.case import SEEDED_ORDERS, Case


class Divided(Protocol):
    """A Case, or another problem whose tokens are divided among ranks."""

    def division(self) -> shards.Division: ...


def layout_of(case: Divided) -> Layout:
    """Return the `Layout` of the Case; `case.shards()` computes the same shards independently."""
    return _layout(*case.division())


def key_layout_of(case: Case) -> Layout:
    """Return the `Layout` of the Case's keys."""
    return _layout(*case.key_division())


@lru_cache(maxsize=256)
def _layout(
    order: str, n: int, p: int, cuts: tuple[int, ...] | None, seed: int, documents: tuple[int, ...] | None = None,
    chunk: int | None = None,
) -> Layout:  # fmt: skip
    if order == "dealt chunks":
        listed = shards.shards(order, n, p, cuts, seed, documents, chunk)
        return Layout.from_cuts(np.concatenate(listed.positions), tuple(accumulate(listed.counts, initial=0)))
    if order in SEEDED_ORDERS:
        tokens = shards.permuted(n, p, seed) if order == "permuted" else getattr(shards, order)(n, seed)
        return Layout.from_cuts(tokens, cuts or [r * n // p for r in range(p + 1)])
    if order in ("spliced", "stepped", "paired", "dealt", "contiguous by document"):
        by_rank = _positions_by_rank(order, n, p, documents or (n,))
        positions = torch.tensor([x for own in by_rank for x in own], dtype=torch.int64)
        return Layout.from_cuts(positions, cuts or list(accumulate(map(len, by_rank), initial=0)))
    if order == "contiguous" and cuts is not None:
        return Layout.from_cuts(range(n), cuts)  # works for any length: no list of positions is made
    if chunk is not None:
        layout = Layout.whole_chunks(n, p, chunk, documents)
    else:
        zigzag = order == "zigzag by document"
        layout = Layout.zigzag(n, p, documents=documents) if zigzag else getattr(Layout, order)(n, p)
    if cuts is None:
        return layout
    return Layout.from_cuts(torch.cat([layout.positions(rank) for rank in range(p)]), cuts)


def _positions_by_rank(order: str, n: int, p: int, documents: tuple[int, ...]) -> list[list[int]]:
    """Return the positions of each rank in an order that has no constructor in `Layout`."""
    if order == "spliced":  # each rank has two interleaved runs of different steps
        evens = (n + 1) // 2
        return [
            [*range(2 * (r * evens // p), 2 * ((r + 1) * evens // p), 2), *range(1 + 2 * r, n, 2 * p)] for r in range(p)
        ]
    if order == "stepped":  # each rank has a run of step 1, then one of step p
        half = (n + 1) // 2
        return [[*range(r * half // p, (r + 1) * half // p), *range(half + r, n, p)] for r in range(p)]
    if order == "paired":
        return [list(range(i * n // p, (i + 1) * n // p)) for i in (*range(0, p, 2), *range(1, p, 2))]
    if order == "dealt":
        hands = [range(hand, n, shards.HANDS * p) for hand in range(shards.HANDS * p)]
        return [[x for hand in hands[shards.HANDS * r : shards.HANDS * (r + 1)] for x in hand] for r in range(p)]
    starts = list(zip(accumulate(documents, initial=0), documents, strict=False))
    return [
        [x for start, length in starts for x in range(start + r * length // p, start + (r + 1) * length // p)]
        for r in range(p)
    ]


def strided_copy(x: Tensor, other: int = 2) -> Tensor:
    """Return a tensor equal to x, of one dimension or at least three, that is not contiguous.

    Dimensions 1 and `other` are swapped in memory, in a slice of a larger buffer; of one dimension, every second entry
    is taken. The rest of the buffer is NaN, so that reading with wrong strides shows.
    """
    if x.dim() == 1:
        every_second = x.new_full((2 * len(x),), math.nan)[::2]
        return every_second.copy_(x)
    swapped = x.transpose(1, other)
    buffer = x.new_full([size + 1 for size in swapped.shape], math.nan)
    inner = buffer[tuple(slice(1, None) for _ in swapped.shape)]
    inner.copy_(swapped)
    return inner.transpose(1, other)
