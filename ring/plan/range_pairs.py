"""Which ranges see which: the join of query ranges with key ranges of the same block and segment.

A pair names some elements of a query range and some of a key range. Causality trims it, so that every query of a pair
sees at least one of its keys and every key is seen by at least one of its queries.

Where a block has a window, the table's segments are no longer than what the window reaches (`ring.plan.blocks`). So a
query sees all of its own segment, as if there were no window, and some of the segment before: the keys from a position
on. In a pattern that is not causal it sees some of the segment behind, too: the keys up to a position.

The example (see `ring.plan`): in a block and segment each of two ranges could see both, but causality hides every key
of a later range. These are the pairs of block 0; ranges 1 and 3 are rank 1's. Those of block 1 are the same pairs of
ranges 4 to 7, one position further on.

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

from ring.plan.ranges import Ints, Ranges, Subranges, counter


class Sight(Enum):
    """Which keys of a segment a query sees."""

    ALL = auto()
    UP_TO = auto()  # up to its own position
    UP_TO_WINDOW = auto()  # of the segment behind its own, up to its own position and the window
    FROM_WINDOW = auto()  # of the segment before its own, from its own position less the window on


_AWAY = {Sight.UP_TO_WINDOW: 1, Sight.FROM_WINDOW: -1}  # segments from the query's to the key's


@dataclass(frozen=True, eq=False)
class RangePairs:
    """Pairs of subranges, `query` and `key` side by side; `item`: which of the keys that were joined the key is.

    sight: which keys a query of each pair sees. descending: whether kernels are to take the elements from the last one
    on.
    """

    query: Subranges
    key: Subranges
    item: Ints
    sight: Sight
    descending: bool = False

    def __len__(self) -> int:
        return len(self.item)

    def take(self, which: Ints) -> RangePairs:
        return replace(self, query=self.query.take(which), key=self.key.take(which), item=self.item[which])

    def reach(self, ranges: Ranges) -> Ints | int:
        """The window of each pair, in positions; 0 where none has to be looked at."""
        return ranges.window[self.query.range] if self.sight in _AWAY else 0

    def from_the_last(self) -> RangePairs:
        """The same elements, in descending order of position."""
        return replace(self, descending=True)

    def part(self, *, queries: tuple[Ints, Ints], keys: tuple[Ints, Ints]) -> RangePairs:
        """Of each pair some elements, given as (how many to skip, how many to take)."""
        return replace(self, query=self.query.part(*queries), key=self.key.part(*keys))


def pair_up(ranges: Ranges, queries: Subranges, keys: Subranges, causal: bool) -> list[RangePairs]:
    """All pairs in which something is visible, trimmed to what is, by sight. `keys` must be in ascending order of
    range.
    """
    found = [_joined(ranges, queries, keys, Sight.UP_TO if causal else Sight.ALL)]
    if any(block.window is not None for block in ranges.blocks):
        near = queries.take(np.flatnonzero(ranges.window[queries.range] >= 0))
        found += [_joined(ranges, near, keys, s) for s in (Sight.FROM_WINDOW, Sight.UP_TO_WINDOW)[: 1 if causal else 2]]
    return [_trim(ranges, pairs) for pairs in found]


def _joined(ranges: Ranges, queries: Subranges, keys: Subranges, sight: Sight) -> RangePairs:
    """All pairs of queries with keys of the segment that the sight is of."""
    span = int(ranges.segment.max(initial=0)) + 3
    group, away = ranges.block * span + ranges.segment, _AWAY.get(sight, 0)
    key_group, query_group = group[keys.range], group[queries.range] + away
    low = np.searchsorted(key_group, query_group, side="left")
    partners = np.searchsorted(key_group, query_group, side="right") - low
    query = np.repeat(np.arange(len(partners)), partners)
    key = low[query] + counter(partners)
    return RangePairs(queries.take(query), keys.take(key), item=key, sight=sight)


def _trim(ranges: Ranges, found: RangePairs) -> RangePairs:
    if found.sight is Sight.ALL:
        return found
    return _trim_from(ranges, found) if found.sight is Sight.FROM_WINDOW else _trim_up_to(ranges, found)


def _trim_up_to(ranges: Ranges, found: RangePairs) -> RangePairs:
    """Drop the keys beyond what the last query reaches, then the queries that do not reach the first key."""
    q, k = found.query, found.key
    last_query = ranges.position(q.range, q.first + q.count - 1)
    visible = np.clip(ranges.count_until(k.range, last_query + found.reach(ranges)) - k.first, 0, k.count)
    some = np.flatnonzero(visible)
    found, visible = found.take(some), visible[some]
    q, k = found.query, found.key
    first_key = ranges.position(k.range, k.first)
    blind = np.maximum(ranges.count_until(q.range, first_key - found.reach(ranges) - 1) - q.first, 0)
    return found.part(queries=(blind, q.count - blind), keys=(np.zeros_like(visible), visible))


def _trim_from(ranges: Ranges, found: RangePairs) -> RangePairs:
    """Drop the keys before what the first query reaches, then the queries that do not reach the last key."""
    q, k = found.query, found.key
    first_query = ranges.position(q.range, q.first)
    hidden = np.maximum(ranges.count_until(k.range, first_query - found.reach(ranges) - 1) - k.first, 0)
    some = np.flatnonzero(hidden < k.count)
    found, hidden = found.take(some), hidden[some]
    q, k = found.query, found.key
    last_key = ranges.position(k.range, k.first + k.count - 1)
    seeing = np.minimum(ranges.count_until(q.range, last_key + found.reach(ranges)) - q.first, q.count)
    return found.part(queries=(np.zeros_like(seeing), seeing), keys=(hidden, k.count - hidden))
