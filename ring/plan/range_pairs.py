"""Which ranges see which: the join of query ranges with key ranges of the same block and segment.

A pair names some elements of a query range and some of a key range. Causality trims it, so that every query of a pair
sees at least one of its keys and every key is seen by at least one of its queries.

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

from dataclasses import dataclass

import numpy as np

from ring.plan.ranges import Ints, Ranges, Subranges, counter


@dataclass(frozen=True, eq=False)
class RangePairs:
    """Pairs of subranges, `query` and `key` side by side; `item`: which of the keys that were joined the key is."""

    query: Subranges
    key: Subranges
    item: Ints

    def __len__(self) -> int:
        return len(self.item)

    def take(self, which: Ints) -> RangePairs:
        return RangePairs(self.query.take(which), self.key.take(which), self.item[which])

    def part(self, *, queries: tuple[Ints, Ints], keys: tuple[Ints, Ints]) -> RangePairs:
        """Of each pair some elements, given as (how many to skip, how many to take)."""
        return RangePairs(self.query.part(*queries), self.key.part(*keys), self.item)


def pair_up(ranges: Ranges, queries: Subranges, keys: Subranges, causal: bool) -> RangePairs:
    """All pairs in which something is visible, trimmed to what is. `keys` must be in ascending order of range."""
    span = int(ranges.segment.max(initial=0)) + 1
    group = ranges.block * span + ranges.segment
    key_group, query_group = group[keys.range], group[queries.range]
    low = np.searchsorted(key_group, query_group, side="left")
    partners = np.searchsorted(key_group, query_group, side="right") - low
    query = np.repeat(np.arange(len(partners)), partners)
    key = low[query] + counter(partners)
    found = RangePairs(queries.take(query), keys.take(key), item=key)
    return _trim(ranges, found) if causal else found


def _trim(ranges: Ranges, found: RangePairs) -> RangePairs:
    """Drop the keys beyond the last query, then the queries before the first key."""
    q, k = found.query, found.key
    last_query = ranges.position(q.range, q.first + q.count - 1)
    visible = np.clip(ranges.count_until(k.range, last_query) - k.first, 0, k.count)
    some = np.flatnonzero(visible)
    found, visible = found.take(some), visible[some]
    q, k = found.query, found.key
    first_key = ranges.position(k.range, k.first)
    blind = np.maximum(ranges.count_until(q.range, first_key - 1) - q.first, 0)
    return found.part(queries=(blind, q.count - blind), keys=(np.zeros_like(visible), visible))
