"""Ranges and range pairs by themselves, against a dense look at the pattern: nothing in them is in vain."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern, multiplicity, selected
from ring.layout import Layout
from ring.plan.blocks import Block
from ring.plan.range_pairs import Sight, pair_up
from ring.plan.ranges import Ranges, Subranges, joined, ranges_of
from ring.plan.tile import Mask
from ring.plan.tiling import masked
from tests.ring.plan.plan_walk import Array
from tests.support.plan_settings import layouts, listed, patterns


def elements(ranges: Ranges, index: int) -> tuple[list[int], list[int]]:
    """Rows and positions of a range."""
    element = np.arange(ranges.count[index])
    which = np.full_like(element, index)
    if ranges.listing is not None:
        rows = ranges.listing.rows[ranges.row[index] + element]
    else:
        rows = ranges.row[index] + element * ranges.row_step[index]
    return rows.tolist(), ranges.position(which, element).tolist()


@st.composite
def tables(draw: Any) -> tuple[Pattern, Layout, Ranges]:
    pattern, layout = draw(patterns(2)), draw(layouts())
    if layout.n and draw(st.booleans()):
        layout = listed(layout)
    return pattern, layout, ranges_of(pattern, layout, 2, 1)


@settings(max_examples=100)
@given(tables())
def test_ranges_are_the_selected_rows(table: tuple[Pattern, Layout, Ranges]) -> None:
    _, layout, ranges = table
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    at = np.arange(-1, layout.n + 1)
    for index in range(len(ranges.count)):
        of_block, rank = int(ranges.block[index]), int(ranges.rank[index])
        rows, positions = elements(ranges, index)
        ascending = positions == sorted(set(positions)) and (np.diff(rows) > 0).all()
        assert (rows and ascending) or ranges.listing is not None
        assert layout.positions(rank)[rows].tolist() == positions
        found[of_block, rank] += positions
        until = ranges.count_until(np.full_like(at, index), at)
        assert until.tolist() == [sum(position <= x for position in positions) for x in at.tolist()]
    for number, block in enumerate(ranges.blocks):
        branch = replace(branch_of(block), offset=0)
        for rank in range(layout.world_size):
            held = layout.positions(rank)
            assert sorted(found[number, rank]) == sorted(held[selected(branch, held, block.offset)].tolist())
    order = list(zip(ranges.block.tolist(), ranges.segment.tolist(), ranges.rank.tolist(), strict=True))
    assert order == sorted(order)


EVENS, ODDS = Branch(None, 2, 0), Branch(None, 2, 1)


@pytest.mark.parametrize(
    ("branches", "shard", "rows"),
    (
        # One range: rows follow each other as positions do.
        ((Branch(),), (0, 1, 2, 3, 12, 13, 14, 15), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ((Branch(),), (0, 1, 4, 5, 6, 9, 10, 11, 12), [[0, 1, 2, 3, 4, 5, 6, 7, 8]]),
        ((EVENS,), (0, 1, 2, 3, 12, 13, 14, 15), [[0, 2, 4, 6]]),
        # Positions do not ascend where a run ends: 5 is before 6.
        ((Branch(),), (0, 2, 4, 6, 5, 7), [[0, 1, 2, 3], [4, 5]]),
        ((Branch(),), (0, 1, 2, 4, 6, 5, 7), [[0, 1, 2], [3, 4], [5, 6]]),
        # Every row of the one run is selected, every other row of the other.
        ((EVENS,), (0, 2, 4, 8, 9, 10, 11), [[0, 1, 2], [3, 5]]),
        ((EVENS,), (0, 1, 2, 3, 6, 8, 10), [[0, 2], [4, 5, 6]]),
        # Rows that follow each other, of two blocks: in one segment, and in two.
        ((EVENS, ODDS), (2, 4, 5, 7), [[0, 1], [2, 3]]),
        ((Branch(2, 2, 0), ODDS), (2, 4, 5, 7), [[0], [1], [2, 3]]),
    ),
)
def test_own_ranges_are_one_where_rows_follow_as_positions_do(
    branches: tuple[Branch, ...], shard: tuple[int, ...], rows: list[list[int]]
) -> None:
    """The shard of the first of four ranks, the rest in ascending order: the rows of its ranges, in their order."""
    rest = sorted(set(range(16)) - set(shard))
    layout = Layout.from_cuts((*shard, *rest), (0, len(shard), 16, 16, 16))
    assert layout.runs is not None
    own = joined(ranges_of(Pattern(branches), layout, 1, 1), 0)
    assert [elements(own, index)[0] for index in range(len(own.count))] == rows


@settings(max_examples=100)
@given(tables(), st.data())
def test_range_pairs_are_the_visible_pairs_and_nothing_blind(table: tuple[Pattern, Layout, Ranges], data: Any) -> None:
    pattern, layout, ranges = table
    every = np.arange(len(ranges.count))
    # Any subrange of every range: plans cut keys at buckets.
    first = np.array([data.draw(st.integers(0, int(c) - 1)) for c in ranges.count], np.int64)
    keys = Subranges(every, first, ranges.count - first)
    found = pair_up(ranges, Subranges.whole(ranges, every), keys, pattern.causal)
    pairs = np.zeros((len(ranges.blocks), layout.n, layout.n), np.int64)
    for mask, part in chain.from_iterable(masked(ranges, one) for one in found):
        for i in range(len(part.item)):
            seen, q, k, of_block = dense_pair(ranges, mask, part, i)
            assert seen.any(0).all() and seen.any(1).all(), "a row or key of a range pair that sees nothing"
            pairs[of_block][np.ix_(q, k)] += seen
    at = torch.arange(layout.n)
    for number, block in enumerate(ranges.blocks):
        seen = multiplicity(Pattern((branch_of(block),), pattern.causal), at, at, 1)[0].numpy().astype(bool)
        kept = [elements(ranges, index)[1][first[index] :] for index in every.tolist() if ranges.block[index] == number]
        seen[:, sorted(set(range(layout.n)) - {position for part in kept for position in part})] = False
        assert (pairs[number] == seen).all()


def dense_pair(ranges: Ranges, mask: Mask, part: Any, i: int) -> tuple[Array, Array, Array, int]:
    """What a range pair sees (query rows, keys), the positions of both, and its block."""

    def positions(subranges: Subranges) -> Array:
        element = subranges.first[i] + np.arange(subranges.count[i])
        return ranges.position(np.full_like(element, subranges.range[i]), element)

    q, k = positions(part.query), positions(part.key)
    if part.descending:
        q, k = q[::-1], k[::-1]
    if mask is Mask.FULL:
        seen = np.ones((len(q), len(k)), bool)
    elif mask is Mask.CAUSAL:
        assert len(q) == len(k)
        seen = np.tril(np.ones((len(q), len(k)), bool))
    else:
        reach = np.broadcast_to(part.reach(ranges), len(part))[i]
        seen = k[None] >= q[:, None] - reach if part.sight is Sight.FROM_WINDOW else k[None] <= q[:, None] + reach
    return seen, q, k, int(ranges.block[part.query.range[i]])


def branch_of(block: Block) -> Branch:
    """The branch of a block, for a single head."""
    length = block.segment_length if block.window is None else block.whole_segment
    return Branch(length, block.dilation_rate, block.offset, window=block.window)
