"""Ranges, range pairs, needs and blocks, by themselves: what plans are made of, against a dense look at the pattern."""

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
from ring.plan.blocks import Block, blocks_of
from ring.plan.needs import needs_of
from ring.plan.range_pairs import Sight, pair_up
from ring.plan.ranges import Ranges, Subranges, joined, ranges_of
from ring.plan.tile import Mask
from ring.plan.tiling import masked
from tests.support.plan_settings import layouts, listed, patterns, rank_of_position
from verification.run.plan_walk import Array, listed_heads

# --- ranges, range pairs and needs ---


@pytest.mark.parametrize("p", (2, 3, 7))
def test_phases_of_rates_whose_products_need_more_than_64_bits(p: int) -> None:
    """A rank's positions on a grid, both known to Python, which counts without end."""
    n, length, rate, offset = 2**40, 2**39 + 1, 2**33 + 1, 5
    ranges = ranges_of(Pattern((Branch(length, rate, offset),)), Layout.striped(n, p), 1, 1)
    found = sorted(position for index in range(len(ranges.count)) for position in elements(ranges, index)[1])
    assert found == [*range(offset, length, rate), *range(length + offset, n, rate)]
    for index, rank in enumerate(ranges.rank.tolist()):
        assert all((row, rank) == divmod(position, p) for row, position in zip(*elements(ranges, index), strict=True))


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


@settings(max_examples=100, deadline=None)
@given(tables())
def test_ranges_are_the_selected_rows(table: tuple[Pattern, Layout, Ranges]) -> None:
    _, layout, ranges = table
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in range(len(ranges.count)):
        of_block, segment, rank = (int(column[index]) for column in (ranges.block, ranges.segment, ranges.rank))
        rows, positions = elements(ranges, index)
        ascending = positions == sorted(set(positions)) and (np.diff(rows) > 0).all()
        assert (rows and ascending) or ranges.listing is not None
        assert layout.positions(rank)[rows].tolist() == positions
        assert {segment_of(ranges.blocks[of_block], position) for position in positions} == {segment}
        found[of_block, rank] += positions
        at = np.arange(-1, layout.n + 1)
        until = ranges.count_until(np.full_like(at, index), at)
        assert until.tolist() == [sum(position <= x for position in positions) for x in at.tolist()]
    for number, block in enumerate(ranges.blocks):
        branch = replace(branch_of(block), offset=0)
        for rank in range(layout.world_size):
            held = layout.positions(rank)
            assert sorted(found[number, rank]) == sorted(held[selected(branch, held, block.offset)].tolist())
    key = [ranges.block, ranges.segment, ranges.rank]
    order = list(zip(*(column.tolist() for column in key), strict=True))
    assert order == sorted(order)


def segment_of(block: Block, position: int) -> int:
    """The number of a position's segment. With a window, a number is left out behind each of the branch's segments."""
    if block.window is None:
        return position // block.segment_length
    number, within = divmod(position, block.whole_segment)
    return number * (-(-block.whole_segment // block.segment_length) + 1) + within // block.segment_length


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


@settings(max_examples=100, deadline=None)
@given(tables(), st.data())
def test_range_pairs_are_the_visible_pairs_and_nothing_blind(table: tuple[Pattern, Layout, Ranges], data: Any) -> None:
    pattern, layout, ranges = table
    every = np.arange(len(ranges.count))
    # Any subrange of every range: plans cut keys at buckets.
    first = np.array([data.draw(st.integers(0, int(c) - 1)) for c in ranges.count], np.int64)
    keys = Subranges(every, first, ranges.count - first)
    queries = Subranges.whole(ranges, every)
    found = pair_up(ranges, queries, keys, pattern.causal)
    pairs = np.zeros((len(ranges.blocks), layout.n, layout.n), np.int64)
    for one in found:
        assert (one.key.range == keys.range[one.item]).all()
    for mask, part in chain.from_iterable(masked(ranges, one) for one in found):
        for i in range(len(part.item)):
            seen, q, k, of_block = dense_pair(ranges, mask, part, i)
            assert seen.any(0).all() and seen.any(1).all(), "a row or key of a range pair that sees nothing"
            pairs[of_block][np.ix_(q, k)] += seen
    for number, block in enumerate(ranges.blocks):
        at = torch.arange(layout.n)
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
    elif part.sight is Sight.FROM_WINDOW:
        seen = k[None] >= q[:, None] - np.broadcast_to(part.reach(ranges), len(part))[i]
    else:
        seen = k[None] <= q[:, None] + np.broadcast_to(part.reach(ranges), len(part))[i]
    return seen, q, k, int(ranges.block[part.query.range[i]])


def branch_of(block: Block) -> Branch:
    """The branch of a block, for a single head."""
    length = block.segment_length if block.window is None else block.whole_segment
    return Branch(length, block.dilation_rate, block.offset, window=block.window)


@settings(max_examples=100, deadline=None)
@given(tables())
def test_needs_are_what_some_row_sees(table: tuple[Pattern, Layout, Ranges]) -> None:
    pattern, layout, ranges = table
    needs = needs_of(ranges, pattern.causal)
    found = np.zeros((len(ranges.blocks), layout.world_size, layout.n), bool)
    columns = needs.rank, needs.range, needs.first, needs.count
    for rank, index, first, count in zip(*(column.tolist() for column in columns), strict=True):
        assert ranges.rank[index] != rank and 0 < count <= ranges.count[index] - first
        assert first == 0 or first + count == ranges.count[index], "neither leading nor trailing"
        positions = elements(ranges, index)[1][first : first + count]
        assert not found[ranges.block[index], rank, positions].any(), "one need said twice"
        found[ranges.block[index], rank, positions] = True
    owner, at = rank_of_position(layout), torch.arange(layout.n)
    for number, block in enumerate(ranges.blocks):
        seen = multiplicity(Pattern((branch_of(block),), pattern.causal), at, at, 1)[0].numpy() > 0
        for rank in range(layout.world_size):
            wanted = seen[owner == rank].any(0) & (owner != rank)
            assert (found[number, rank] == wanted).all()


# --- blocks ---


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_blocks_serve_every_head_once_with_its_offset(data: Any) -> None:
    kv_heads = data.draw(st.integers(1, 4))
    heads = kv_heads * data.draw(st.integers(1, 4))
    pattern = data.draw(patterns(heads))
    served: dict[tuple[int, range, int], int] = defaultdict(int)  # window, places in a segment, head
    for block in blocks_of(pattern, 10, heads, kv_heads):
        kv = listed_heads(block.key)[:, 0].tolist()
        assert kv == sorted(set(kv)) and block.width == len(kv)
        reading = set()
        for group in block.head_groups:
            query, key, column = (listed_heads(x) for x in (group.query, group.key, group.column))
            assert (query // (heads // kv_heads) == key).all() and (np.array(kv)[column] == key).all()
            reading |= set(key.ravel().tolist())
            for head in query.ravel().tolist():
                length = block.segment_length if block.window is None else block.whole_segment
                places = range(block.offset, length, block.dilation_rate)
                served[-1 if block.window is None else block.window, places, head] += 1
        assert reading == set(kv)
    wanted: dict[tuple[int, range, int], int] = defaultdict(int)
    for branch in pattern.branches:
        for head, offset in enumerate(branch.offsets(heads)):
            if offset is not None:
                places = range(offset, min(branch.segment_length or 10, 10), branch.dilation_rate)
                # On the grid, and where it is no limit none.
                reach = None if branch.window is None else branch.window // places.step * places.step
                wanted[-1 if reach is None or reach + places.step >= places.stop else reach, places, head] += 1
    assert served == wanted
