"""Runs of own rows that one call with a window takes: ranges that continue each other across the parts of a window.

A block with a window has segments no longer than the window (`ring.plan.blocks`), so that a call without a window can
take any of them. A kernel that takes windows computes all of them at once, in one pass over the keys. Pairs of
different runs, and remote keys, remain pairs of ranges.

Two parts of 4 tokens, the second divided: of one rank's ranges, 0 and 1 make the run 0, the range 2 is none.

    range  segment  count  row  first  step  run
    0      0        4      0    0      1      0
    1      1        2      4    4      1      0
    2      1        1      6    7      1     -1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ring.plan.ranges import Ints, Ranges, group_starts


@dataclass(frozen=True, eq=False)
class WindowRuns:
    """Runs of a rank's own ranges.

    table    a range for each run
    reach    elements before its own that a query of each run sees, and after it unless causal
    run_of   the run of each of the rank's ranges, -1 where it is none's
    """

    table: Ranges
    reach: Ints
    run_of: Ints


def window_runs(own: Ranges, most: int, longest: int) -> WindowRuns | None:
    """Return the runs of two ranges or more; None if there is none.

    Args:
        own: ranges of one rank (`ring.plan.ranges.merge_adjacent`).
        most: most elements of a run.
        longest: longest window that kernels take, in elements.
    """
    if own.listing is not None or own.first_key is not None or not len(own.count):
        return None
    reach = own.window // own.step
    follows = _follows(own) & (reach >= 1) & (reach <= longest)
    ends, begins = np.cumsum(own.count), [0]
    for start, end in pairwise([*np.flatnonzero(~follows).tolist(), len(follows)]):
        begin = start
        while begin < end:
            before = ends[begin] - own.count[begin]
            begin = max(begin + 1, min(end, int(np.searchsorted(ends, before + most, side="right"))))
            begins.append(begin)
    sizes, first = np.diff(begins), np.array(begins[:-1])
    several = np.flatnonzero(sizes > 1)
    if not len(several):
        return None
    number = np.full(len(sizes), -1)
    number[several] = np.arange(len(several))
    table = replace(own.take(first[several]), count=np.add.reduceat(own.count, first)[several])
    return WindowRuns(table, reach[first[several]], np.repeat(number, sizes))


def _follows(own: Ranges) -> np.ndarray:
    """Return True for each range that continues the one before in rows and positions, in its segment or the next."""
    last = own.position(np.arange(len(own.count)), own.count - 1)
    follows = ~group_starts(own.block, own.row_step, own.step)
    follows[1:] &= (
        (np.diff(own.segment) <= 1)
        & (own.row[1:] == own.row[:-1] + own.count[:-1] * own.row_step[:-1])
        & (own.first[1:] == last[:-1] + own.step[1:])
    )
    return follows
