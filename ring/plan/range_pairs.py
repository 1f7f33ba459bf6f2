"""Pairs of ranges with a visible key: the join of query ranges with key ranges of the same block and segment.

A pair names some elements of a query range and some of a key range. It is trimmed to the mask: every query of a pair
sees at least one of its keys, and every key is seen by at least one of its queries.

Where a block has a window, the table's segments are no longer than the window (`ring.plan.blocks`). So a query sees all
of its own segment, as if there were no window, and the segment before from a position on. In a block that is not causal
it also sees the next segment, up to a position.

Slices are met by `ring.plan.slice_pairs`.

The example (see `ring.plan`): a block has two ranges in each segment, and causality hides every key of a later range.
These are the pairs of block 0; ranges 1 and 3 are rank 1's. Block 1 has the same pairs of ranges 4 to 7, one position
further on.

    query  positions  key  positions
    0      0 2        0    0 2
    1      4 6        0    0 2
    1      4 6        1    4 6
    2      12 14      2    12 14
    2      12 14      3    8 10
    3      8 10       3    8 10
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from ring.plan.ranges import Ints, Ranges, Subranges, ragged_arange


class Sight(Enum):
    """Keys of a pair that a query sees."""

    ALL = auto()
    UP_TO = auto()  # up to its own position plus the bound
    FROM = auto()  # from its own position plus the bound on


@dataclass(frozen=True, eq=False)
class RangePairs:
    """Pairs of subranges, `query[i]` with `key[i]`; `item`: the key's index among the keys passed to `pair_up`.

    sight: the keys that a query of each pair sees. bound: the distance in positions to its last, or first, key.
    segment: of each pair, ascending; pairs of two segments have no row and no key in common. descending: kernels take
    the elements from the last one on.
    """

    query: Subranges
    key: Subranges
    item: Ints
    sight: Sight
    bound: Ints
    segment: Ints
    sliced: bool = False  # of slices
    descending: bool = False

    def __len__(self) -> int:
        return len(self.item)

    def take(self, which: Ints) -> RangePairs:
        return replace(
            self, query=self.query.take(which), key=self.key.take(which), item=self.item[which],
            bound=self.bound[which], segment=self.segment[which],
        )  # fmt: skip

    def from_the_last(self) -> RangePairs:
        """Return the same elements in descending order of position."""
        return replace(self, descending=True)

    def part(self, *, queries: tuple[Ints, Ints], keys: tuple[Ints, Ints]) -> RangePairs:
        """Select elements of each pair: (how many to skip, how many to take)."""
        return replace(self, query=self.query.part(*queries), key=self.key.part(*keys))


def pair_up(ranges: Ranges, queries: Subranges, keys: Subranges) -> list[RangePairs]:
    """Return all pairs that a block sees as it covers its segments, trimmed to the mask. `keys` ascend by range."""
    covered, causal = ranges.covered[queries.range], ranges.causal[queries.range]
    tables = [_join(ranges, queries, keys, Sight.UP_TO, covered & causal)]
    tables.append(_join(ranges, queries, keys, Sight.ALL, covered & ~causal))
    if any(block.window is not None for block in ranges.blocks):
        near = covered & (ranges.window[queries.range] >= 0)
        tables.append(_join(ranges, queries, keys, Sight.FROM, near))
        tables.append(_join(ranges, queries, keys, Sight.UP_TO, near & ~causal, away=1))
    return [trim(ranges, pairs) for pairs in tables if len(pairs)]


def group_of(ranges: Ranges) -> Ints:
    """Return a number for the block and segment of each range, ascending. Those of adjacent segments differ by 1, those
    of other blocks by more than 2.
    """
    return ranges.block * (int(ranges.segment.max(initial=0)) + 3) + ranges.segment


def _join(
    ranges: Ranges, queries: Subranges, keys: Subranges, sight: Sight, chosen: np.ndarray, away: int = 0
) -> RangePairs:
    """Pair the chosen queries with all keys of their segment, or of the one that lies `away` from it."""
    queries, away = queries.take(np.flatnonzero(chosen)), -1 if sight is Sight.FROM else away
    group = group_of(ranges)
    key_group, query_group = group[keys.range], group[queries.range] + away
    low = np.searchsorted(key_group, query_group, side="left")
    partners = np.searchsorted(key_group, query_group, side="right") - low
    query = np.repeat(np.arange(len(partners)), partners)
    key = low[query] + ragged_arange(partners)
    left = queries.take(query)
    bound = away * ranges.window[left.range] if away else np.zeros_like(key)
    return RangePairs(left, keys.take(key), item=key, sight=sight, bound=bound, segment=ranges.segment[left.range])


def trim(ranges: Ranges, pairs: RangePairs) -> RangePairs:
    """Drop the queries and keys of each pair that see, or are seen by, nothing; and pairs of which none is left."""
    if pairs.sight is Sight.ALL:
        return pairs
    return _trim_from(ranges, pairs) if pairs.sight is Sight.FROM else _trim_up_to(ranges, pairs)


def _trim_up_to(ranges: Ranges, pairs: RangePairs) -> RangePairs:
    """Drop the keys that the last query does not reach, then the queries that do not reach the first key."""
    q, k = pairs.query, pairs.key
    last_query = ranges.position(q.range, q.first + q.count - 1)
    visible = np.clip(ranges.count_until(k.range, last_query + pairs.bound) - k.first, 0, k.count)
    some = np.flatnonzero(visible)
    pairs, visible = pairs.take(some), visible[some]
    q, k = pairs.query, pairs.key
    first_key = ranges.position(k.range, k.first)
    blind = np.maximum(ranges.count_until(q.range, first_key - pairs.bound - 1) - q.first, 0)
    return pairs.part(queries=(blind, q.count - blind), keys=(np.zeros_like(visible), visible))


def _trim_from(ranges: Ranges, pairs: RangePairs) -> RangePairs:
    """Drop the keys that the first query does not reach, then the queries that do not reach the last key."""
    q, k = pairs.query, pairs.key
    first_query = ranges.position(q.range, q.first)
    hidden = np.maximum(ranges.count_until(k.range, first_query + pairs.bound - 1) - k.first, 0)
    some = np.flatnonzero(hidden < k.count)
    pairs, hidden = pairs.take(some), hidden[some]
    q, k = pairs.query, pairs.key
    last_key = ranges.position(k.range, k.first + k.count - 1)
    seeing = np.minimum(ranges.count_until(q.range, last_key - pairs.bound) - q.first, q.count)
    return pairs.part(queries=(np.zeros_like(seeing), seeing), keys=(hidden, k.count - hidden))
