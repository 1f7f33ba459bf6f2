"""A Case as the implementation takes it: the `Layout` that its ranks are given, and inputs that are not contiguous."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from reference import shards
from ring import Layout
from verification.case import SEEDED_ORDERS


class Divided(Protocol):
    """A Case, or what else has tokens that are divided among ranks."""

    def division(self) -> shards.Division: ...


def layout_of(case: Divided) -> Layout:
    """What `case.shards()` says independently, as a `Layout`."""
    return _layout(*case.division())


@lru_cache(maxsize=256)
def _layout(
    order: str, n: int, p: int, cuts: tuple[int, ...] | None, seed: int, documents: tuple[int, ...] | None = None
) -> Layout:
    if order in SEEDED_ORDERS:
        listed = shards.permuted(n, p, seed) if order == "permuted" else getattr(shards, order)(n, seed)
        return Layout.from_cuts(listed, cuts or [r * n // p for r in range(p + 1)])
    if order in ("spliced", "stepped", "paired", "dealt", "contiguous by document"):
        held = _held(order, n, p, documents or (n,))
        positions = torch.tensor([x for mine in held for x in mine], dtype=torch.int64)
        return Layout.from_cuts(positions, cuts or list(accumulate(map(len, held), initial=0)))
    if order == "contiguous" and cuts is not None:
        return Layout.from_cuts(range(n), cuts)  # of any length: nothing is listed
    zigzag = order == "zigzag by document"
    layout: Layout = Layout.zigzag(n, p, documents=documents) if zigzag else getattr(Layout, order)(n, p)
    if cuts is None:
        return layout
    return Layout.from_cuts(torch.cat([layout.positions(rank) for rank in range(p)]), cuts)


def _held(order: str, n: int, p: int, documents: tuple[int, ...]) -> list[list[int]]:
    """What each rank holds in an order that `Layout` has no name for."""
    if order == "spliced":  # on each rank two runs of different steps that lie within each other
        evens = (n + 1) // 2
        return [
            [*range(2 * (r * evens // p), 2 * ((r + 1) * evens // p), 2), *range(1 + 2 * r, n, 2 * p)] for r in range(p)
        ]
    if order == "stepped":  # on each rank a run of step 1, then one of the ranks' number
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
    """A tensor equal to x, of at least three dimensions, that is not contiguous: dimensions 1 and `other` lie in the
    other order, in a slice of a larger buffer. What the slice leaves out is NaN, which a reader that goes by the wrong
    strides gets.
    """
    swapped = x.transpose(1, other)
    buffer = x.new_full([size + 1 for size in swapped.shape], math.nan)
    inner = buffer[tuple(slice(1, None) for _ in swapped.shape)]
    inner.copy_(swapped)
    return inner.transpose(1, other)
