"""The order of the rows in a block of heads, which several ranks send.

If all ranks divide the heads, a block has every position, and its rows lie in ascending order: then a causal mask is
one call of a kernel. Shard after shard, two ranks in zigzag order would make it six calls, and results to merge.

Where other ranks have the same heads, or a layout has many runs of positions, the rows lie shard after shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ring.layout import Layout

_MOST_RUNS = 8  # for each rank; each is copied by itself
Places = tuple[tuple[range, ...], ...]  # for each rank that sends rows: where they lie in the block, in its own order


def block_layout(layout: Layout, groups: Sequence[Sequence[int]]) -> Layout:
    """Return the layout of the ranks with the same heads. groups: the ranks that divide heads, for each of them."""
    return Layout.contiguous(layout.n, 1) if _is_ascending(layout, groups) else layout.joined(groups)


def block_places(layout: Layout, groups: Sequence[Sequence[int]], dividing: Sequence[int]) -> Places:
    """Return the places of the rows of each of `dividing`, one of the groups."""
    if _is_ascending(layout, groups):
        runs = (layout.shard_runs(rank) for rank in dividing)
        return tuple(
            tuple(range(start, start + step * length, step) for start, step, length in shard) for shard in runs
        )
    edges = list(accumulate((layout.counts[rank] for rank in dividing), initial=0))
    return tuple((range(*span),) for span in pairwise(edges))


def _is_ascending(layout: Layout, groups: Sequence[Sequence[int]]) -> bool:
    return len(groups) == 1 and layout.runs is not None and len(layout.runs) <= _MOST_RUNS * layout.world_size
