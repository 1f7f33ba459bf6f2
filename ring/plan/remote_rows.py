"""What every rank needs of the others: the remote keys of its range pairs.

Whoever sees a key of a range sees all keys before it in that range. So what a rank needs of a range is its leading
elements. With a window it may see a key from the segment behind, and then sees all keys after it, as well: it needs the
trailing elements, or both.

The example (see `ring.plan`): of each remote range that it sees, a rank needs both elements. Rank 0 needs the keys of
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
from ring.plan.ranges import Ints, Ranges, Subranges, concatenated, opens


@dataclass(frozen=True, eq=False)
class Needs:
    """Rank `rank[i]` needs `count[i]` elements, from number `first[i]` on, of the range `range[i]`, which another rank
    holds: the leading ones, or the trailing ones. What it needs of a range are one or two entries that are apart.
    """

    rank: Ints
    range: Ints
    first: Ints
    count: Ints

    def take(self, which: Ints) -> Needs:
        return Needs(self.rank[which], self.range[which], self.first[which], self.count[which])


_kept: BoundedCache[tuple[Ranges, bool], Needs] = BoundedCache(16, most_bytes=2**27)


def needs_of(ranges: Ranges, causal: bool) -> Needs:
    """The needs of all ranks, in the order (rank, range, first). Every rank computes all, so both ends of a message
    agree.
    """
    key = ranges, causal
    return _kept.get_or_make(key, lambda: _needs(*key), lambda made: ranges.nbytes + 4 * made.count.nbytes)


def _needs(ranges: Ranges, causal: bool) -> Needs:
    everything = Subranges.whole(ranges, np.arange(len(ranges.count)))
    found = [_remote(ranges, pairs) for pairs in pair_up(ranges, everything, everything, causal)]
    needs = Needs(*(concatenated(columns) for columns in zip(*found, strict=True)))
    # Elements that are needed more than once, or follow each other, become one entry. `apart` sets ranges apart.
    apart = int(ranges.count.max(initial=0)) + 2
    needs = needs.take(np.lexsort((needs.range * apart + needs.first, needs.rank)))
    start = np.cumsum(opens(needs.rank, needs.range)) * apart + needs.first
    end = np.maximum.accumulate(start + needs.count)
    leads = np.ones(len(end), bool)
    leads[1:] = start[1:] > end[:-1]
    begin = np.flatnonzero(leads)
    last = np.append(begin[1:], len(end)) - 1 if len(begin) else begin
    return replace(needs.take(begin), count=end[last] - start[begin])


def _remote(ranges: Ranges, found: RangePairs) -> tuple[Ints, Ints, Ints, Ints]:
    """(rank, range, first, count) of the keys that other ranks hold."""
    reader = ranges.rank[found.query.range]
    remote = np.flatnonzero(reader != ranges.rank[found.key.range])
    key = found.key.take(remote)
    return reader[remote], key.range, key.first, key.count
