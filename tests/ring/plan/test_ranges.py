"""Ranges and range pairs by themselves, against a dense look at the pattern: nothing in them is in vain."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern, multiplicity
from ring.layout import Layout
from ring.plan.range_pairs import Sight, pair_up
from ring.plan.ranges import Ranges, Subranges, merge_adjacent, ranges_of
from ring.plan.remote_rows import needs_of
from ring.plan.slice_pairs import slice_pairs
from ring.plan.tile import Mask
from ring.plan.tiling import split_by_mask
from tests.ring.plan.plan_walk import Array
from tests.support.plan_settings import layouts, listed, patterns, with_slices

EVENS, ODDS = Branch(None, 2, 0), Branch(None, 2, 1)


@pytest.mark.parametrize(
    ("branches", "shard", "rows"),
    (
        # One range: rows follow each other as positions do.
        ((Branch(),), (0, 1, 4, 5, 6, 9, 10, 11, 12), [[0, 1, 2, 3, 4, 5, 6, 7, 8]]),
        ((EVENS,), (0, 1, 2, 3, 12, 13, 14, 15), [[0, 2, 4, 6]]),
        # Positions do not ascend where a run ends: 5 is before 6.
        ((Branch(),), (0, 1, 2, 4, 6, 5, 7), [[0, 1, 2], [3, 4], [5, 6]]),
        # Every row of the one run is selected, every other row of the other.
        ((EVENS,), (0, 2, 4, 8, 9, 10, 11), [[0, 1, 2], [3, 5]]),
        # Rows that follow each other, of two blocks: in one segment, and in two.
        ((EVENS, ODDS), (2, 4, 5, 7), [[0, 1], [2, 3]]),
        ((Branch(2, 2, 0), ODDS), (2, 4, 5, 7), [[0], [1], [2, 3]]),
    ),
)
def test_contiguous_rows_are_one_range(
    branches: tuple[Branch, ...], shard: tuple[int, ...], rows: list[list[int]]
) -> None:
    """The shard of the first of four ranks, the rest in ascending order: the rows of its ranges, in their order."""
    rest = sorted(set(range(16)) - set(shard))
    layout = Layout.from_cuts((*shard, *rest), (0, len(shard), 16, 16, 16))
    assert layout.runs is not None
    own = merge_adjacent(ranges_of(Pattern(branches), layout, 1, 1), 0)
    found = zip(own.row, own.row_step, own.count, strict=True)
    assert [(row + step * np.arange(count)).tolist() for row, step, count in found] == rows


def test_needs_within_others_end_none_early() -> None:
    """Rows 8 to 11 of rank 1 need all keys of rank 0; two of these, which begin later, end before them."""
    pattern = Pattern.slices([((8, 12), (0, 8), "full"), ((12, 14), (2, 4), "full"), ((14, 16), (5, 7), "full")])
    ((_, needs),) = needs_of(ranges_of(pattern, Layout.contiguous(16, 2), 1, 1))
    assert [x.tolist() for x in (needs.rank, needs.first, needs.count)] == [[1], [0], [8]]


def test_rows_on_a_grid_of_huge_phase_are_exact() -> None:
    n, rate, offset = 2**40, 2**37 - 25, 2**36
    ranges = ranges_of(Pattern((Branch(None, rate, offset),)), Layout.striped(n, 3), 1, 1)
    whole = Subranges.whole(ranges, np.arange(len(ranges.count)))
    selected = np.concatenate([positions(ranges, whole, i) for i in range(len(ranges.count))])
    assert sorted(selected.tolist()) == list(range(offset, n, rate))


@settings(max_examples=100)
@given(patterns(2), layouts(), st.booleans(), st.integers(0, 4), st.data())
def test_range_pairs_are_exactly_the_visible_pairs(
    pattern: Pattern, layout: Layout, listing: bool, window: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        pattern = data.draw(with_slices(pattern, layout.n))
    ranges = ranges_of(pattern, listed(layout) if layout.n and listing else layout, 2, 1)
    every = np.arange(len(ranges.count))
    # Any subrange of every range: plans cut keys at buckets.
    first = np.array([data.draw(st.integers(0, int(c) - 1)) for c in ranges.count], np.int64)
    keys = Subranges(every, first, ranges.count - first)
    whole = Subranges.whole(ranges, every)
    found = pair_up(ranges, whole, keys) + slice_pairs(ranges, whole, keys)
    pairs = np.zeros((len(ranges.blocks), layout.n, layout.n), np.int64)
    for mask, part in chain.from_iterable(split_by_mask(ranges, one, window) for one in found):
        for i in range(len(part.item)):
            seen, q, k = dense_pair(ranges, mask, part, i)
            assert seen.any(0).all() and seen.any(1).all(), "a row or key of a range pair that sees nothing"
            pairs[ranges.block[part.query.range[i]]][np.ix_(q, k)] += seen
    at = torch.arange(layout.n)
    for number, block in enumerate(ranges.blocks):
        length = block.segment_length if block.window is None else block.whole_segment
        grid = Branch(length, block.dilation_rate, block.offset)
        cover = replace(grid, window=block.window, slices=None if block.covers else ())
        parts = Pattern((cover,), block.causal), Pattern((replace(grid, slices=block.slices),))
        own, by_slices = (multiplicity(part, at, at, 1)[0].numpy().astype(bool) for part in parts)
        assert not (own & by_slices).any()
        seen = own | by_slices
        kept = [positions(ranges, keys, i) for i in every.tolist() if ranges.block[i] == number]
        seen[:, np.setdiff1d(at, np.concatenate([[], *kept]))] = False
        assert (pairs[number] == seen).all()


def positions(ranges: Ranges, subranges: Subranges, i: int) -> Array:
    element = subranges.first[i] + np.arange(subranges.count[i])
    return ranges.position(np.full_like(element, subranges.range[i]), element)


def dense_pair(ranges: Ranges, mask: Mask, part: Any, i: int) -> tuple[Array, Array, Array]:
    """Mask of a range pair (query rows, keys), and the positions of both."""
    q, k = positions(ranges, part.query, i), positions(ranges, part.key, i)
    if part.descending:
        q, k = q[::-1], k[::-1]
    if mask is Mask.FULL:
        return np.ones((len(q), len(k)), bool), q, k
    if mask in (Mask.CAUSAL, Mask.ANTICAUSAL):
        assert len(q) == len(k) and not (part.descending and mask is Mask.ANTICAUSAL)
        triangle = np.tril if mask is Mask.CAUSAL else np.triu
        return triangle(np.ones((len(q), len(k)), bool)), q, k
    limit = q[:, None] + part.bound[i]
    return k[None] >= limit if part.sight is Sight.FROM else k[None] <= limit, q, k
