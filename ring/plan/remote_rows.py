"""The remote keys that every rank needs for its range pairs.

A query that sees a key of a range sees all keys before it in that range. So a rank needs the leading elements of a
range. With a window a query of the next segment sees a key and all keys after it: then a rank needs the trailing
elements, or both.

The example (see `ring.plan`): a rank needs both elements of each remote range that it sees. Rank 0 needs the keys of
positions 8 and 10 (range 3) and 9 and 11 (range 7), rank 1 those of 0 and 2 (range 0) and 1 and 3 (range 4).

    rank  range  first  count
    0     3      0      2
    0     7      0      2
    1     0      0      2
    1     4      0      2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ring.caching.bounded_cache import BoundedCache
from ring.plan.range_pairs import RangePairs, pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated, group_starts


@dataclass(frozen=True, eq=False)
class Needs:
    """Remote elements: rank `rank[i]` needs elements first[i] .. first[i] + count[i] - 1 of the range `range[i]`. They
    are its leading or its trailing ones: a range has at most two entries for a rank, with a gap between them.
    """

    rank: Ints
    range: Ints
    first: Ints
    count: Ints

    def take(self, which: Ints) -> Needs:
        return Needs(self.rank[which], self.range[which], self.first[which], self.count[which])


_cache: BoundedCache[tuple[Ranges, bool], Needs] = BoundedCache(16, most_bytes=2**27)


def needs_of(ranges: Ranges, causal: bool) -> Needs:
    """Return the needs of all ranks, in the order (rank, range, first). Every rank computes all, so both ends agree."""
    key = ranges, causal
    return _cache.get_or_make(key, lambda: _needs(*key), lambda needs: ranges.nbytes + 4 * needs.count.nbytes)


def _needs(ranges: Ranges, causal: bool) -> Needs:
    queries, keys = (Subranges.whole(ranges, which) for which in (ranges.queries, ranges.keys))
    tables = [_remote(ranges, pairs) for pairs in pair_up(ranges, queries, keys, causal)]
    needs = Needs(*(concatenated(columns) for columns in zip(*tables, strict=True)))
    # Merge overlapping and adjacent entries. Offset each range by `span`, so that entries of two ranges never merge.
    span = int(ranges.count.max(initial=0)) + 2
    needs = needs.take(np.lexsort((needs.range * span + needs.first, needs.rank)))
    start = np.cumsum(group_starts(needs.rank, needs.range)) * span + needs.first
    end = np.maximum.accumulate(start + needs.count)
    leads = np.ones(len(end), bool)
    leads[1:] = start[1:] > end[:-1]
    begin = np.flatnonzero(leads)
    last = np.append(begin[1:], len(end)) - 1 if len(begin) else begin
    return replace(needs.take(begin), count=end[last] - start[begin])


def _remote(ranges: Ranges, pairs: RangePairs) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (rank, range, first, count) of the keys that other ranks hold."""
    reader = ranges.rank[pairs.query.range]
    remote = np.flatnonzero(reader != ranges.rank[pairs.key.range])
    key = pairs.key.take(remote)
    return reader[remote], key.range, key.first, key.count
