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


class Divided(Protocol):
    """A Case, or what else has tokens that are divided among ranks."""

    def division(self) -> tuple[str, int, int, tuple[int, ...] | None, int]: ...


def layout_of(case: Divided) -> Layout:
    """What `case.shards()` says independently, as a `Layout`."""
    return _layout(*case.division())


@lru_cache(maxsize=256)
def _layout(order: str, n: int, p: int, cuts: tuple[int, ...] | None, seed: int) -> Layout:
    if order in ("shuffled", "permuted"):
        listed = shards.shuffled(n, seed) if order == "shuffled" else shards.permuted(n, p, seed)
        return Layout.from_cuts(listed, cuts or [r * n // p for r in range(p + 1)])
    if order == "spliced":  # on each rank two runs of different steps that lie within each other
        evens = (n + 1) // 2
        runs = [
            (range(2 * (r * evens // p), 2 * ((r + 1) * evens // p), 2), range(1 + 2 * r, n, 2 * p)) for r in range(p)
        ]
        counts = [len(even) + len(odd) for even, odd in runs]
        spliced = torch.tensor([position for pair in runs for run in pair for position in run], dtype=torch.int64)
        return Layout.from_cuts(spliced, cuts or list(accumulate(counts, initial=0)))
    if order in ("paired", "dealt"):
        several = 1 if order == "paired" else shards.HANDS  # ranges of a rank
        ranges = [range(i * n // p, (i + 1) * n // p) for i in (*range(0, p, 2), *range(1, p, 2))]
        if order == "dealt":
            ranges = [range(hand, n, several * p) for hand in range(several * p)]
        in_ranges = torch.tensor([position for held in ranges for position in held], dtype=torch.int64)
        return Layout.from_cuts(in_ranges, cuts or list(accumulate(map(len, ranges), initial=0))[::several])
    if order == "contiguous" and cuts is not None:
        return Layout.from_cuts(range(n), cuts)  # of any length: nothing is listed
    layout: Layout = getattr(Layout, order)(n, p)
    if cuts is None:
        return layout
    return Layout.from_cuts(torch.cat([layout.positions(rank) for rank in range(p)]), cuts)


def strided_copy(x: Tensor, other: int = 2) -> Tensor:
    """A tensor equal to x that is not contiguous: dimensions 1 and `other` lie in the other order, in a slice of a
    larger buffer. With the last dimension as `other`, that is not the innermost one any more.

    x has at least three dimensions (q is (B, n, H, D), lse (B, H, n)). What the slice leaves out is NaN, so that a
    reader that goes by the wrong strides gets NaN. Tensors of one element or none have no other order, but lie in the
    larger buffer too.
    """
    swapped = x.transpose(1, other)
    buffer = x.new_full([size + 1 for size in swapped.shape], math.nan)
    inner = buffer[tuple(slice(1, None) for _ in swapped.shape)]
    inner.copy_(swapped)
    return inner.transpose(1, other)
