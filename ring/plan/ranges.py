"""Where the blocks meet the shards. A range is what one rank holds of one block's grid in one segment.

All ranges of all ranks are one table with an array for each column; the plan is made by joining this table with itself.
A range is mostly an arithmetic progression in rows and in positions, as Python's `range` is. A layout that is kept as
runs has at most one such range for each run, block and segment, so the table takes O(runs x segments), not O(tokens).
A layout whose order is listed has ranges that are listed too, in ascending order of position.

The example (see `ring.plan`): 2 blocks, 2 segments and 2 ranks make 8 ranges. Each has two elements, two rows and two
positions apart. Range 2, say, has rows 4 and 6 of rank 0, which are the positions 12 and 14.

    range  block  segment  rank  count  row  row_step  first  step
    0      0      0        0     2      0    2         0      2
    1      0      0        1     2      0    2         4      2
    2      0      1        0     2      4    2         12     2
    3      0      1        1     2      4    2         8      2
    4      1      0        0     2      1    2         1      2
    5      1      0        1     2      1    2         5      2
    6      1      1        0     2      5    2         13     2
    7      1      1        1     2      5    2         9      2

Which elements of a run lie on a grid is a congruence; `_on_grid` solves it and explains how.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from reference.pattern import Pattern
from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.blocks import Block, blocks_of
from ring.plan.pieces import DocumentTable, Ints, Pieces

COLUMNS = ("block", "segment", "rank", "count", "row", "row_step", "first", "step")


@dataclass(frozen=True, eq=False)
class Listing:
    """Elements of ranges that are not arithmetic: range after range, each in ascending order of position."""

    rows: Ints
    positions: Ints
    order: Ints  # span * range + position, ascending: one binary search finds a position within its range
    span: int


@dataclass(frozen=True, eq=False)
class Ranges:
    """The table, in the order (block, segment, rank). Element e of a range, 0 <= e < count, ascends in position.

    Without a listing its row is row + e * row_step and its position first + e * step. With one its row is
    listing.rows[row + e] and its position listing.positions[row + e].
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
    listing: Listing | None = None
    packed: bool = False  # whether there are several documents

    def position(self, index: Ints, element: Ints) -> Ints:
        """Global position of an element of the range `index`."""
        if self.listing is not None:
            return self.listing.positions[self.row[index] + element]
        return self.first[index] + element * self.step[index]

    def count_until(self, index: Ints, position: Ints) -> Ints:
        """How many elements of the range `index` lie at or before a position."""
        if self.listing is not None:
            position = np.clip(position, -1, self.listing.span - 1)  # else it would be one of another range
            until = np.searchsorted(self.listing.order, index * self.listing.span + position, side="right")
            return until - self.row[index]
        reached = (position - self.first[index]) // self.step[index] + 1
        return np.clip(reached, 0, self.count[index])

    def rows(self, subranges: Subranges) -> tuple[Ints, Ints]:
        """First row of every subrange and the step between its rows; with a listing, first place in it and 1."""
        step = self.row_step[subranges.range]
        return self.row[subranges.range] + subranges.first * step, step

    @property
    def nbytes(self) -> int:
        """Of the columns and the listing."""
        listed = self.listing.rows.nbytes if self.listing is not None else 0
        return len(COLUMNS) * self.count.nbytes + 3 * listed

    @cached_property
    def width(self) -> Ints:
        """Slots that an element of each range takes in a message."""
        return np.array([block.width for block in self.blocks], np.int64)[self.block]

    @cached_property
    def window(self) -> Ints:
        """The farthest position that a query of each range reaches; -1 where there is no limit."""
        return np.array([-1 if block.window is None else block.window for block in self.blocks], np.int64)[self.block]

    def take(self, which: Ints) -> Ranges:
        """Some rows of the table. Not for a table with a listing, where a range's number is part of `order`."""
        assert self.listing is None
        return replace(self, **{name: getattr(self, name)[which] for name in COLUMNS})


@dataclass(frozen=True, eq=False)
class Subranges:
    """Elements first .. first + count - 1 of ranges, which are named by their numbers in the table."""

    range: Ints
    first: Ints
    count: Ints

    @classmethod
    def whole(cls, ranges: Ranges, which: Ints) -> Subranges:
        """All elements of some ranges."""
        return cls(range=which, first=np.zeros_like(which), count=ranges.count[which])

    @classmethod
    def join(cls, parts: Sequence[Subranges]) -> Subranges:
        """The subranges of all parts, one part after the other."""
        return cls(*(concatenated([getattr(part, name) for part in parts]) for name in ("range", "first", "count")))

    def __len__(self) -> int:
        return len(self.range)

    def take(self, which: Ints) -> Subranges:
        return Subranges(self.range[which], self.first[which], self.count[which])

    def part(self, skip: Ints, count: Ints) -> Subranges:
        """Of each subrange `count` elements, behind the first `skip`."""
        return Subranges(self.range, self.first + skip, count)

    def cut(self, most: int) -> tuple[Subranges, Ints]:
        """The same elements in subranges of at most `most`, and for each the subrange that it is part of."""
        parts = -(-self.count // most)
        which = np.repeat(np.arange(len(parts)), parts)
        skip, uncut = counter(parts) * most, self.take(which)
        return uncut.part(skip, np.minimum(uncut.count - skip, most)), which


_tables: BoundedCache[Hashable, Ranges] = BoundedCache(64, most_bytes=2**28)


def ranges_of(pattern: Pattern, layout: Layout, heads: int, kv_heads: int) -> Ranges:
    """The ranges of all ranks."""
    key = pattern, layout, heads, kv_heads
    return _tables.get_or_make(key, lambda: _ranges(*key), lambda made: made.nbytes)


def _ranges(pattern: Pattern, layout: Layout, heads: int, kv_heads: int) -> Ranges:
    blocks = blocks_of(replace(pattern, documents=None), layout.n, heads, kv_heads)
    documents = DocumentTable.of(pattern.documents, layout.n)
    if layout.listed is not None:
        return _listed_ranges(blocks, layout, documents)
    runs = _runs_of(layout)
    pieces = Pieces.of(runs, documents)
    tables = []
    for index, block in enumerate(blocks):
        if block.window is None:
            tables.append(_arithmetic_ranges(index, block, pieces, documents))
        else:
            segments = documents.cut(block.whole_segment)
            tables.append(_arithmetic_ranges(index, block, Pieces.of(runs, segments), segments))
    columns: dict[str, Any] = {name: concatenated([table[name] for table in tables]) for name in COLUMNS}
    return Ranges(blocks, packed=len(documents) > 1, **columns)


def _runs_of(layout: Layout) -> Ints:
    """The runs of all ranks, (runs, 5): element e lies at position start + e * step, and in row `row` + e of the rank.
    The columns are rank, row, start, step, length.
    """
    table = []
    for rank in range(layout.world_size):
        row = 0
        for run in layout.shard_runs(rank):
            table.append((rank, row, *run))
            row += run.length
    return np.array(table, np.int64).reshape(-1, 5)


def _arithmetic_ranges(index: int, block: Block, pieces: Pieces, documents: DocumentTable) -> dict[str, Ints]:
    """The columns of one block's ranges, in the order (segment, rank)."""
    w, r = block.segment_length, block.dilation_rate
    first_segment = pieces.start // w
    segments = (pieces.start + (pieces.length - 1) * pieces.step) // w - first_segment + 1
    which = np.repeat(np.arange(len(segments)), segments)
    piece, segment = pieces.take(which), first_segment[which] + counter(segments)
    # The piece's elements low .. high - 1 lie in the segment ...
    low = np.maximum(-((piece.start - segment * w) // piece.step), 0)
    high = np.minimum(-((piece.start - (segment + 1) * w) // piece.step), piece.length)
    # ... and of these every `cycle`-th, from the first on that `_on_grid` finds, lies on the grid, if any does.
    target = segment * w + block.offset - piece.start
    cycle, phase, any_at_all = _on_grid(piece.step, target, r)
    element = low + (phase - low) % cycle
    count = np.where(any_at_all, (high - element + cycle - 1) // cycle, 0)
    segment += documents.first_segment(w)[piece.document]
    columns = {
        "block": np.full_like(segment, index),
        "segment": segment,
        "rank": piece.rank,
        "count": count,
        "row": piece.row + element,
        "row_step": cycle,
        "first": piece.origin + piece.start + element * piece.step,
        "step": piece.step * cycle,
    }
    some = np.flatnonzero(count > 0)
    some = some[np.lexsort((piece.rank[some], segment[some]))]
    return {name: column[some] for name, column in columns.items()}


def _on_grid(step: Ints, target: Ints, rate: int) -> tuple[Ints, Ints, Ints]:
    """The elements e of a run that lie on a grid: e = phase, phase + cycle, phase + 2 * cycle, ..., if any at all.

    Element e lies `step * e` behind the run's start, and the grid's first point `target` behind (or, if negative,
    before) it. So e is on the grid where step * e and target differ by a multiple of the dilation rate, which is
    written step * e = target (mod rate). The left side changes by multiples of the greatest common divisor of step and
    rate only, so there is no such e unless it divides the target. If it does, divide all three numbers by it. What
    remains of the step then has an inverse, a number whose product with it leaves the remainder 1 when divided by
    cycle = rate / divisor; multiplying by it gives e = inverse * target (mod cycle).

    The example's runs have step 1. Other runs, and the positions that they have on the grid 0, rate, 2 * rate, ...:

        start  step  rate  target  cycle  phase  on the grid
        12     1     2     -12     2      0      12 14 16
        1      3     2     -1      2      1      4 10 16
        2      2     6     -2      3      2      6 12 18
        1      2     6     -1      -      -      -
    """
    few, at = np.unique(step, return_inverse=True)  # runs have few steps, however many pieces they are cut into
    divisor = np.gcd(few, rate)
    cycle = rate // divisor
    inverse = _inverses(few // divisor, cycle)[at]
    divisor, cycle = divisor[at], cycle[at]
    phase = _product(target // divisor % cycle, inverse, cycle)
    return cycle, phase, target % divisor == 0


def _product(a: Ints, b: Ints, modulus: Ints) -> Ints:
    """a * b % modulus for 0 <= a, b < modulus <= 2^41 + 1, where a * b need not fit into 64 bits.

    b is taken in two parts, b = high * 2^21 + low, so that no number on the way passes 2^63.
    """
    high, low = b >> 21, b & (2**21 - 1)
    return ((a * high % modulus << 21) + a * low) % modulus


def _inverses(values: Ints, moduli: Ints) -> Ints:
    """The inverse of each value modulo each modulus."""
    pairs = zip(values.tolist(), moduli.tolist(), strict=True)
    return np.array([pow(value, -1, modulus) for value, modulus in pairs], np.int64)


def _listed_ranges(blocks: tuple[Block, ...], layout: Layout, documents: DocumentTable) -> Ranges:
    """For a layout whose order is listed: every selected position is looked at."""
    assert layout.listed is not None
    ranks = np.repeat(np.arange(layout.world_size), layout.counts)
    rows = np.arange(layout.n) - np.asarray(layout.cuts)[ranks]
    found = [_selected(block, layout.listed, documents) for block in blocks]
    entry, segment = (np.concatenate(columns) for columns in zip(*found, strict=True))
    block = np.repeat(np.arange(len(blocks)), [len(some) for some, _ in found])
    order = np.lexsort((layout.listed[entry], ranks[entry], segment, block))
    entry, block, segment = entry[order], block[order], segment[order]
    begin = np.flatnonzero(opens(block, segment, ranks[entry]))
    count = np.diff(np.append(begin, len(entry)))
    positions, span = layout.listed[entry], layout.n + 1
    return Ranges(
        blocks,
        block=block[begin],
        segment=segment[begin],
        rank=ranks[entry][begin],
        count=count,
        row=begin,
        row_step=np.ones_like(begin),
        first=positions[begin],
        step=np.zeros_like(begin),
        listing=Listing(rows[entry], positions, np.repeat(np.arange(len(begin)), count) * span + positions, span),
        packed=len(documents) > 1,
    )


def _selected(block: Block, position: Ints, documents: DocumentTable) -> tuple[Ints, Ints]:
    """Where in an array of positions those of a block's grid are, and the segment of each of them."""
    if block.window is not None:
        documents = documents.cut(block.whole_segment)
    document = documents.holding(position)
    number, within = np.divmod(position - documents.begin[document], block.segment_length)
    some = np.flatnonzero((within >= block.offset) & ((within - block.offset) % block.dilation_rate == 0))
    return some, (number + documents.first_segment(block.segment_length)[document])[some]


def joined(ranges: Ranges, rank: int) -> Ranges:
    """The ranges of one rank, for what it attends to of its own. Those of a block and segment become one range where
    they follow each other both in rows and in positions.

    Between own rows only their order counts, so the positions of a joined range are 0, 1, 2, ... The two halves of a
    zigzag shard then see themselves as one causal square: one kernel call instead of three. Where there is a window,
    distances count as well, and ranges stay as they are.
    """
    if ranges.listing is not None:
        return ranges
    own = np.flatnonzero(ranges.rank == rank)
    own = own[np.lexsort((ranges.first[own], ranges.segment[own], ranges.block[own]))]
    chosen = ranges.take(own)
    if not len(own):
        return chosen
    row, step, count = chosen.row, chosen.row_step, chosen.count
    last = chosen.position(np.arange(len(own)), count - 1)
    leads = opens(chosen.block, chosen.segment)  # the first range of its block and segment
    follows = leads.copy()
    follows[1:] |= (
        (row[1:] == row[:-1] + count[:-1] * step[:-1]) & (step[1:] == step[:-1]) & (chosen.first[1:] > last[:-1])
    )
    begin, group = np.flatnonzero(leads), np.cumsum(leads) - 1
    several = np.diff(np.append(begin, len(own))) > 1
    merged = (np.logical_and.reduceat(follows, begin) & several)[group] & (chosen.window < 0)
    found = replace(
        chosen,
        count=np.where(merged, np.add.reduceat(count, begin)[group], count),
        first=np.where(merged, 0, chosen.first),
        step=np.where(merged, 1, chosen.step),
    )
    return found.take(np.flatnonzero(leads | ~merged))


def opens(*columns: Ints) -> np.ndarray:
    """Whether each entry opens a group of neighbours that are equal in all columns."""
    found = np.ones(len(columns[0]), bool)
    if len(found):
        found[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found


def counter(counts: Ints) -> Ints:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, ..."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)


def concatenated(arrays: Sequence[Ints]) -> Ints:
    """One array after the other; of none, an empty one."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
