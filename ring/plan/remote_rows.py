"""The remote keys that every rank needs for its range pairs.

A query that sees a key of a range sees all keys before it in that range. So a rank needs the leading elements of a
range. With a window a query of the next segment sees a key and all keys after it: then a rank needs the trailing
elements, or both. By a slice it may need any.

The example (see `ring.plan`): a rank needs both elements of each remote range that it sees. Rank 0 needs the keys of
positions 8 and 10 (range 3) and 9 and 11 (range 7), rank 1 those of 0 and 2 (range 0) and 1 and 3 (range 4).

    rank  range  first  count
    0     3      0      2
    0     7      0      2
    1     0      0      2
    1     4      0      2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ring.plan.range_pairs import RangePairs, group_of, pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated, group_starts
from ring.plan.slice_pairs import slice_pairs

# Pairs of ranges at a time: the arrays about them stay in the caches of a processor.
_BATCH = 2**16


@dataclass(frozen=True, eq=False)
class Needs:
    """Remote elements: rank `rank[i]` needs elements first[i] .. first[i] + count[i] - 1 of the range `range[i]`.
    Entries of a range for a rank have gaps between them.
    """

    rank: Ints
    range: Ints
    first: Ints
    count: Ints

    def take(self, which: Ints) -> Needs:
        return Needs(self.rank[which], self.range[which], self.first[which], self.count[which])

    @classmethod
    def join(cls, parts: Sequence[Needs]) -> Needs:
        """Concatenate the needs of all parts."""
        return cls(*(concatenated([getattr(x, name) for x in parts]) for name in ("rank", "range", "first", "count")))


def needs_of(ranges: Ranges) -> Iterator[tuple[slice, Needs]]:
    """Yield the needs of all ranks, for some ranges of keys after others: the ranges, and their needs in the order
    (rank, range, first). Every rank computes all, so both ends of a message agree.
    """
    group, queries, keys = group_of(ranges), ranges.queries, ranges.keys
    if any(block.slices for block in ranges.blocks):  # by which a query sees keys of far segments
        yield slice(0, len(ranges.count)), _needs(ranges, *(Subranges.whole(ranges, some) for some in (queries, keys)))
        return
    low = np.searchsorted(group[queries], group[keys] - 1, "left")
    high = np.searchsorted(group[queries], group[keys] + 1, "right")
    batch = np.cumsum(high - low) // _BATCH
    begins = np.flatnonzero(group_starts(batch)).tolist() if len(batch) else []
    for begin, end in pairwise([*begins, len(batch)]):
        near = Subranges.whole(ranges, queries[low[begin] : high[end - 1]])
        chosen = keys[begin:end]
        yield slice(chosen[0], chosen[-1] + 1), _needs(ranges, near, Subranges.whole(ranges, chosen))


def _needs(ranges: Ranges, queries: Subranges, keys: Subranges) -> Needs:
    pairs = pair_up(ranges, queries, keys) + slice_pairs(ranges, queries, keys)
    needs = Needs.join([_remote(ranges, table) for table in pairs])
    if ranges.chunked:
        needs = replace(needs, first=np.zeros_like(needs.first), count=ranges.count[needs.range])
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


def _remote(ranges: Ranges, pairs: RangePairs) -> Needs:
    """Return the keys of pairs that other ranks hold."""
    reader = ranges.rank[pairs.query.range]
    remote = np.flatnonzero(reader != ranges.rank[pairs.key.range])
    key = pairs.key.take(remote)
    return Needs(reader[remote], key.range, key.first, key.count)
