"""What every rank needs of the others: the remote keys of its range pairs.

Whoever sees a key of a range sees all keys before it in that range. So what a rank needs of a range is always its
leading elements, and one number says how many.

The example (see `ring.plan`): of each remote range that it sees, a rank needs both elements. Rank 0 needs the keys of
positions 8 and 10 (range 3) and 9 and 11 (range 7), rank 1 those of 0 and 2 (range 0) and 1 and 3 (range 4).

    rank  range  count
    0     3      2
    0     7      2
    1     0      2
    1     4      2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ring.caching.bounded import Bounded
from ring.plan.range_pairs import pair_up
from ring.plan.ranges import Ints, Ranges, Subranges, opens


@dataclass(frozen=True, eq=False)
class Needs:
    """Rank `rank[i]` needs the first `count[i]` elements of the range `range[i]`, which another rank holds."""

    rank: Ints
    range: Ints
    count: Ints

    def take(self, which: Ints) -> Needs:
        return Needs(self.rank[which], self.range[which], self.count[which])


_kept: Bounded[tuple[Ranges, bool], Needs] = Bounded(16, most_bytes=2**27)


def needs_of(ranges: Ranges, causal: bool) -> Needs:
    """The needs of all ranks, in the order (rank, range). Every rank computes all, so both ends of a message agree."""
    key = ranges, causal
    return _kept.once(key, lambda: _needs(*key), lambda made: ranges.nbytes + 3 * made.count.nbytes)


def _needs(ranges: Ranges, causal: bool) -> Needs:
    everything = Subranges.whole(ranges, np.arange(len(ranges.count)))
    found = pair_up(ranges, everything, everything, causal)
    reader = ranges.rank[found.query.range]
    remote = np.flatnonzero(reader != ranges.rank[found.key.range])
    needs = Needs(reader[remote], found.key.range[remote], found.key.count[remote])
    needs = needs.take(np.lexsort((needs.range, needs.rank)))
    begin = np.flatnonzero(opens(needs.rank, needs.range))
    most = np.maximum.reduceat(needs.count, begin) if len(begin) else needs.count
    return Needs(needs.rank[begin], needs.range[begin], most)
