"""Where the blocks meet the shards: the rows of one rank on one block's grid in one segment are a range.

A table of ranges, one array per column, for all blocks and all ranks at once: the plan is a join of this table with
itself. For a layout kept as runs a range is arithmetic in rows and positions, and the table costs O(runs x segments).
For a listed layout a range is a subrange of a listing, ascending in position.

Integers only: no tensor, no rank's data, no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from reference.pattern import Pattern
from ring.layout import Layout, Run
from ring.plan.blocks import Block, blocks_of

Ints = np.ndarray  # int64, one entry per range (or per pair of ranges)


@dataclass(frozen=True, eq=False)
class Ranges:
    """Columns in the order (block, segment, rank). Element e of range i, 0 <= e < count[i], counts upwards in position.

    Arithmetic: its row is row[i] + e * row_step[i], its position first[i] + e * step[i].
    Listed: its row is listed_rows[row[i] + e], its position listed_positions[row[i] + e].
    """

    blocks: tuple[Block, ...]
    block: Ints
    segment: Ints
    rank: Ints
    count: Ints
    row: Ints
    row_step: Ints
    first: Ints
    step: Ints
    listed_rows: Ints | None = None
    listed_positions: Ints | None = None
    _sorted: Ints | None = field(default=None, repr=False)  # (range, position) as one ascending number
    _span: int = 0

    @property
    def listed(self) -> bool:
        return self.listed_rows is not None

    def position(self, index: Ints, element: Ints) -> Ints:
        """Global position of an element of a range."""
        if self.listed_positions is not None:
            return self.listed_positions[self.row[index] + element]
        return self.first[index] + element * self.step[index]

    def count_until(self, index: Ints, position: Ints) -> Ints:
        """How many elements of the range lie at or before a position."""
        if self._sorted is not None:
            return np.searchsorted(self._sorted, index * self._span + position, side="right") - self.row[index]
        reached = (position - self.first[index]) // self.step[index] + 1
        return np.clip(reached, 0, self.count[index])


@lru_cache(maxsize=64)
def ranges_of(pattern: Pattern, layout: Layout, heads: int, kv_heads: int) -> Ranges:
    """The ranges of all ranks."""
    blocks = blocks_of(pattern, layout.n, heads, kv_heads)
    if layout.listed is not None:
        return _listed_ranges(blocks, layout)
    runs = [(rank, at, run) for rank in range(layout.world_size) for at, run in _rows_and_runs(layout, rank)]
    tables = [_arithmetic_ranges(b, block, runs) for b, block in enumerate(blocks)]
    columns = np.concatenate([np.empty((8, 0), np.int64), *tables], axis=1)
    order = np.lexsort((columns[2], columns[1], columns[0]))
    return Ranges(blocks, *columns[:, order])


def _rows_and_runs(layout: Layout, rank: int) -> list[tuple[int, Run]]:
    at, found = 0, []
    for run in layout.shard_runs(rank):
        found.append((at, run))
        at += run.length
    return found


def _arithmetic_ranges(index: int, block: Block, runs: Sequence[tuple[int, int, Run]]) -> Ints:
    """The columns (block, segment, rank, count, row, row_step, first, step) of one block: (8, ranges)."""
    if not runs:
        return np.empty((8, 0), np.int64)
    w, r, offset = block.segment_length, block.dilation_rate, block.offset
    table = np.array([(rank, at, *run) for rank, at, run in runs], np.int64).T
    low_segment = table[2] // w
    segments = (table[2] + (table[4] - 1) * table[3]) // w - low_segment + 1
    rank, at, start, step, length = np.repeat(table, segments, axis=1)
    segment = np.repeat(low_segment, segments) + counter(segments)
    # Element e of the run lies in the segment for low <= e < high ...
    low = np.maximum(-((start - segment * w) // step), 0)
    high = np.minimum(-((start - (segment + 1) * w) // step), length)
    # ... and on the grid where step * e = segment * w + offset - start (mod r): every `cycle`-th element, if at all.
    common = np.gcd(step, r)
    target = segment * w + offset - start
    cycle = r // common
    phase = (target // common * _inverses(step // common, cycle)) % cycle
    element = low + (phase - low) % cycle
    count = np.where(target % common == 0, (high - element + cycle - 1) // cycle, 0)
    some = count > 0
    columns = (segment, rank, count, at + element, cycle, start + element * step, step * cycle)
    return np.stack([np.full_like(segment, index), *columns])[:, some]


def _inverses(values: Ints, moduli: Ints) -> Ints:
    """The inverse of each value modulo each modulus; few distinct pairs occur."""
    known = {(v, m): pow(v, -1, m) if m > 1 else 0 for v, m in {*zip(values.tolist(), moduli.tolist(), strict=True)}}
    return np.array([known[pair] for pair in zip(values.tolist(), moduli.tolist(), strict=True)], np.int64)


def _listed_ranges(blocks: tuple[Block, ...], layout: Layout) -> Ranges:
    assert layout.listed is not None
    position = layout.listed
    ranks = np.repeat(np.arange(layout.world_size), layout.counts)
    rows = np.arange(layout.n) - np.asarray(layout.cuts)[ranks]
    chosen, of_block = [], []
    for index, block in enumerate(blocks):
        within = position % block.segment_length
        on_grid = (within >= block.offset) & ((within - block.offset) % block.dilation_rate == 0)
        chosen.append(np.flatnonzero(on_grid))
        of_block.append(np.full(len(chosen[-1]), index))
    entry, block_index = np.concatenate(chosen), np.concatenate(of_block)
    lengths = np.array([block.segment_length for block in blocks])
    segment = position[entry] // lengths[block_index]
    order = np.lexsort((position[entry], ranks[entry], segment, block_index))
    entry, block_index, segment = entry[order], block_index[order], segment[order]
    new = np.ones(len(entry), bool)
    new[1:] = (np.diff(block_index) != 0) | (np.diff(segment) != 0) | (np.diff(ranks[entry]) != 0)
    begin = np.flatnonzero(new)
    count = np.diff(np.append(begin, len(entry)))
    one = np.ones_like(begin)
    listed_positions = position[entry]
    span = layout.n + 1
    range_of = np.repeat(np.arange(len(begin)), count)
    return Ranges(
        blocks, block_index[begin], segment[begin], ranks[entry][begin], count, begin, one,
        listed_positions[begin], 0 * one, rows[entry], listed_positions, range_of * span + listed_positions, span,
    )  # fmt: skip


def joined(ranges: Ranges, rank: int) -> Ranges:
    """The ranges of one rank, for what it attends to of its own; those of a block and segment as one where they follow
    each other in rows as in positions.

    Between own rows only their order counts, so positions of joined ranges are 0, 1, 2, ...: the two halves of a zigzag
    shard then meet themselves along one diagonal, and are one causal call instead of three.
    """
    own = np.flatnonzero(ranges.rank == rank)
    own = own[np.lexsort((ranges.first[own], ranges.segment[own], ranges.block[own]))]
    if ranges.listed or not len(own):
        return _chosen(ranges, own)
    block, segment, count, row, step = (
        x[own] for x in (ranges.block, ranges.segment, ranges.count, ranges.row, ranges.row_step)
    )
    last = ranges.position(own, count - 1)
    opens = np.ones(len(own), bool)
    opens[1:] = (np.diff(block) != 0) | (np.diff(segment) != 0)
    follows = opens.copy()
    follows[1:] |= (
        (row[1:] == row[:-1] + count[:-1] * step[:-1]) & (np.diff(step) == 0) & (ranges.first[own][1:] > last[:-1])
    )
    begin = np.flatnonzero(opens)
    whole = np.logical_and.reduceat(follows, begin)
    kept = np.repeat(~whole, np.diff(np.append(begin, len(own)))) | opens
    total = np.add.reduceat(count, begin)
    group = np.cumsum(opens) - 1
    alone = np.diff(np.append(begin, len(own))) == 1
    one = (whole & ~alone)[group]  # part of a group that becomes one range
    chosen = _chosen(ranges, own[kept])
    one, group = one[kept], group[kept]
    return replace(
        chosen,
        count=np.where(one, total[group], chosen.count),
        first=np.where(one, 0, chosen.first),
        step=np.where(one, 1, chosen.step),
    )


def _chosen(ranges: Ranges, which: Ints) -> Ranges:
    """Some rows of the table. Listed ranges look their positions up by range, so of these all stay."""
    if ranges.listed:
        return ranges
    columns = (
        ranges.block,
        ranges.segment,
        ranges.rank,
        ranges.count,
        ranges.row,
        ranges.row_step,
        ranges.first,
        ranges.step,
    )
    return Ranges(ranges.blocks, *(column[which] for column in columns))


def counter(counts: Ints) -> Ints:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, ..."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
