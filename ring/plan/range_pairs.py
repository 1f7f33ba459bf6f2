"""Which ranges see which: the join of query ranges with key ranges on (block, segment), trimmed by causality.

Integers only. A range pair names a subrange of elements of a query range and of a key range and the mask between them;
every query row of it sees at least one of its keys and every key is seen by at least one of its query rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from ring.plan.ranges import Ints, Ranges, counter


class Mask(IntEnum):
    """What the query rows of a tile see of its keys."""

    FULL = 0  # everything
    CAUSAL = 1  # square; row i sees the keys j <= i
    POSITION = 2  # row i sees the keys whose position is not beyond its own


@dataclass(frozen=True, eq=False)
class Subranges:
    """Elements first .. first + count - 1 of ranges."""

    range: Ints
    first: Ints
    count: Ints

    @classmethod
    def whole(cls, ranges: Ranges, which: Ints) -> Subranges:
        return cls(which, np.zeros_like(which), ranges.count[which])

    def take(self, which: Ints) -> Subranges:
        return Subranges(self.range[which], self.first[which], self.count[which])

    def part(self, skip: Ints, count: Ints) -> Subranges:
        return Subranges(self.range, self.first + skip, count)

    def cut(self, most: int) -> tuple[Subranges, Ints]:
        """The same in subranges of at most so many elements, and the index of the subrange that each is part of."""
        parts = -(-self.count // most)
        which = np.repeat(np.arange(len(parts)), parts)
        skip, whole = counter(parts) * most, self.take(which)
        return whole.part(skip, np.minimum(whole.count - skip, most)), which


@dataclass(frozen=True, eq=False)
class RangePairs:
    """Pairs of subranges, `query` and `key` side by side; `item`: the index of the key subrange that was joined."""

    query: Subranges
    key: Subranges
    item: Ints

    def take(self, which: Ints) -> RangePairs:
        return RangePairs(self.query.take(which), self.key.take(which), self.item[which])

    def part(self, q_skip: Ints, q_count: Ints, k_skip: Ints, k_count: Ints) -> RangePairs:
        return RangePairs(self.query.part(q_skip, q_count), self.key.part(k_skip, k_count), self.item)


def pair_up(ranges: Ranges, queries: Subranges, keys: Subranges, causal: bool) -> RangePairs:
    """All pairs of a block and segment in which something is visible, trimmed to it. `keys` in order of range."""
    span = int(ranges.segment.max(initial=0)) + 1
    group = ranges.block * span + ranges.segment
    key_group, query_group = group[keys.range], group[queries.range]
    low = np.searchsorted(key_group, query_group, side="left")
    pairs = np.searchsorted(key_group, query_group, side="right") - low
    item = np.repeat(low, pairs) + counter(pairs)
    found = RangePairs(queries.take(np.repeat(np.arange(len(pairs)), pairs)), keys.take(item), item)
    return _trim(ranges, found) if causal else found


def _trim(ranges: Ranges, found: RangePairs) -> RangePairs:
    """Drop the keys beyond the last query row, then the query rows before the first key."""
    q, k = found.query, found.key
    last_row = ranges.position(q.range, q.first + q.count - 1)
    visible = np.clip(ranges.count_until(k.range, last_row) - k.first, 0, k.count)
    some = np.flatnonzero(visible)
    found, visible = found.take(some), visible[some]
    q, k = found.query, found.key
    first_key = ranges.position(k.range, k.first)
    blind = np.maximum(ranges.count_until(q.range, first_key - 1) - q.first, 0)
    return found.part(blind, q.count - blind, 0 * visible, visible)


def masked(ranges: Ranges, found: RangePairs, causal: bool) -> list[tuple[Mask, RangePairs]]:
    """The range pairs cut so that each part has one of the three masks.

    Two arithmetic ranges of one step meet along a diagonal: row i sees the keys j <= i + c with c >= 0 once trimmed.
    That is c keys seen by every row, a causal square of t rows and keys, and the rows below the square, which see it
    whole.
    """
    if not causal:
        return [(Mask.FULL, found)]
    q, k = found.query, found.key
    first_row = ranges.position(q.range, q.first)
    full = ranges.position(k.range, k.first + k.count - 1) <= first_row
    if ranges.listed:
        return [(Mask.FULL, found.take(np.flatnonzero(full))), (Mask.POSITION, found.take(np.flatnonzero(~full)))]
    aligned = ranges.step[q.range] == ranges.step[k.range]
    parts = [
        (Mask.FULL, found.take(np.flatnonzero(full))),
        (Mask.POSITION, found.take(np.flatnonzero(~full & ~aligned))),
    ]
    which = np.flatnonzero(~full & aligned)
    found, first_row = found.take(which), first_row[which]
    q, k = found.query, found.key
    before = (first_row - ranges.position(k.range, k.first)) // ranges.step[k.range]  # c
    square = k.count - before  # t
    zero = np.zeros_like(square)
    left = found.part(zero, q.count, zero, before)
    diagonal = found.part(zero, square, before, square)
    below = found.part(square, q.count - square, before, square)
    return [
        *parts,
        (Mask.FULL, left.take(np.flatnonzero(before))),
        (Mask.CAUSAL, diagonal),
        (Mask.FULL, below.take(np.flatnonzero(q.count > square))),
    ]


@dataclass(frozen=True, eq=False)
class Needs:
    """Sparse: rank `rank[e]` needs the first `count[e]` elements of the range `range[e]`, which another rank holds."""

    rank: Ints
    range: Ints
    count: Ints


@lru_cache(maxsize=16)
def needs_of(ranges: Ranges, causal: bool) -> Needs:
    """What every rank needs of every other: prefixes, as whoever sees a key sees all before it in its range."""
    everything = Subranges.whole(ranges, np.arange(len(ranges.count)))
    found = pair_up(ranges, everything, everything, causal)
    reader = ranges.rank[found.query.range]
    remote = np.flatnonzero(reader != ranges.rank[found.key.range])
    reader, index, count = reader[remote], found.key.range[remote], found.key.count[remote]
    order = np.lexsort((index, reader))
    reader, index, count = reader[order], index[order], count[order]
    new = np.ones(len(index), bool)
    new[1:] = (np.diff(reader) != 0) | (np.diff(index) != 0)
    begin = np.flatnonzero(new)
    most = np.maximum.reduceat(count, begin) if len(begin) else count
    return Needs(reader[begin], index[begin], most)
