"""The table of ranges. A range is the part of one block's grid that one rank holds in one segment.

All ranges of all ranks are one table with an array for each column; the plan is made by joining this table with itself.
In self-attention a range holds queries and keys. In cross-attention queries and keys have layouts of their own: the
ranges of queries come first, those of keys behind them.
Most ranges are arithmetic progressions in rows and in positions, like Python's `range`. A layout stored as runs has at
most one such range for each run, block and segment, so the table takes O(runs x segments), not O(tokens). A layout
with a listed order has listed ranges, in ascending order of position.

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

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from reference.pattern import Pattern
from ring.caching.bounded_cache import BoundedCache
from ring.layout import Layout
from ring.plan.blocks import Block, blocks_of
from ring.plan.pieces import DocumentTable, Ints, Pieces
from ring.plan.whole_chunks import straight_runs

COLUMNS = ("block", "segment", "section", "rank", "count", "row", "row_step", "first", "step")


@dataclass(frozen=True, eq=False)
class Listing:
    """Elements of ranges that are not arithmetic: range after range, each in ascending order of position."""

    rows: Ints
    positions: Ints
    order: Ints  # span * range + position, ascending: one binary search finds a position within its range
    span: int


@dataclass(frozen=True, eq=False)
class Ranges:
    """The table, in the order (block, segment, rank), in cross-attention for queries, then for keys. Elements e of a
    range, 0 <= e < count, ascend in position.

    Without a listing, element e has row row + e * row_step and position first + e * step. With one, it has row
    listing.rows[row + e] and position listing.positions[row + e]. A section is a segment, or all parts of a
    segment that a window cuts (`ring.plan.blocks`): a slice sees no key of another.
    """

    blocks: tuple[Block, ...]
    block: Ints
    segment: Ints
    section: Ints
    rank: Ints
    count: Ints
    row: Ints
    row_step: Ints
    first: Ints
    step: Ints
    listing: Listing | None = None
    packed: bool = False  # several documents, or slices
    first_key: int | None = None  # ranges from this one on hold keys, those before it queries; None: all hold both
    chunked: bool = False  # each lies within one chunk of the sequence, and travels whole

    @property
    def queries(self) -> Ints:
        """The numbers of the ranges that hold queries."""
        return np.arange(len(self.count))[: self.first_key]

    @property
    def keys(self) -> Ints:
        """The numbers of the ranges that hold keys."""
        return np.arange(len(self.count))[self.first_key :]

    def position(self, index: Ints, element: Ints) -> Ints:
        """Return the global position of an element of the range `index`."""
        if self.listing is not None:
            return self.listing.positions[self.row[index] + element]
        return self.first[index] + element * self.step[index]

    def count_until(self, index: Ints, position: Ints) -> Ints:
        """Count the elements of the range `index` at or before a position."""
        if self.listing is not None:
            position = np.clip(position, -1, self.listing.span - 1)  # keep the search within the range
            until = np.searchsorted(self.listing.order, index * self.listing.span + position, side="right")
            return until - self.row[index]
        reached = (position - self.first[index]) // self.step[index] + 1
        return np.clip(reached, 0, self.count[index])

    def rows(self, subranges: Subranges) -> tuple[Ints, Ints]:
        """Return each subrange's first row and the step of its rows; with a listing, the first place in it and 1."""
        step = self.row_step[subranges.range]
        return self.row[subranges.range] + subranges.first * step, step

    @property
    def nbytes(self) -> int:
        """Bytes of the columns and the listing."""
        listed = self.listing.rows.nbytes if self.listing is not None else 0
        return len(COLUMNS) * self.count.nbytes + 3 * listed

    @cached_property
    def width(self) -> Ints:
        """Slots that an element of each range takes in a message."""
        return np.array([block.width for block in self.blocks], np.int64)[self.block]

    @cached_property
    def covered(self) -> np.ndarray:
        """True for each range of a block that covers its segments."""
        return np.array([block.covers for block in self.blocks], bool)[self.block]

    @cached_property
    def causal(self) -> np.ndarray:
        """True for each range of a causal block."""
        return np.array([block.causal for block in self.blocks], bool)[self.block]

    @cached_property
    def window(self) -> Ints:
        """Window of each range's queries, in positions; -1 without one."""
        return np.array([-1 if block.window is None else block.window for block in self.blocks], np.int64)[self.block]

    def take(self, which: Ints) -> Ranges:
        """Select rows of the table. It must have no listing, whose `order` contains the numbers of ranges."""
        assert self.listing is None
        return replace(self, **{name: getattr(self, name)[which] for name in COLUMNS})


@dataclass(frozen=True, eq=False)
class Subranges:
    """Elements first .. first + count - 1 of ranges; `range` is a range's number in the table."""

    range: Ints
    first: Ints
    count: Ints

    @classmethod
    def whole(cls, ranges: Ranges, which: Ints) -> Subranges:
        """Return all elements of some ranges."""
        return cls(range=which, first=np.zeros_like(which), count=ranges.count[which])

    @classmethod
    def join(cls, parts: Sequence[Subranges]) -> Subranges:
        """Concatenate the subranges of all parts."""
        return cls(*(concatenated([getattr(part, name) for part in parts]) for name in ("range", "first", "count")))

    def __len__(self) -> int:
        return len(self.range)

    def take(self, which: Ints) -> Subranges:
        return Subranges(self.range[which], self.first[which], self.count[which])

    def part(self, skip: Ints, count: Ints) -> Subranges:
        """Return `count` elements of each subrange, after the first `skip`."""
        return Subranges(self.range, self.first + skip, count)

    def cut(self, most: int) -> tuple[Subranges, Ints]:
        """Cut into subranges of at most `most` elements. Return them, and the index of the original of each."""
        parts = -(-self.count // most)
        which = np.repeat(np.arange(len(parts)), parts)
        skip, uncut = ragged_arange(parts) * most, self.take(which)
        return uncut.part(skip, np.minimum(uncut.count - skip, most)), which


_tables: BoundedCache[Hashable, Ranges] = BoundedCache(64, most_bytes=2**28)


def ranges_of(
    pattern: Pattern, layout: Layout, heads: int, kv_heads: int, key_layout: Layout | None = None,
    chunk: int | None = None,
) -> Ranges:  # fmt: skip
    """Return the ranges of all ranks. key_layout: of the keys; None: `layout`. chunk: cut them at chunks of so many
    tokens, which the layouts must hold whole.
    """
    layouts = (layout,) if key_layout in (None, layout) else (layout, key_layout)
    key = pattern, tuple(x.digest for x in layouts), heads, kv_heads, chunk
    return _tables.get_or_make(
        key, lambda: _ranges(pattern, layouts, heads, kv_heads, chunk), lambda table: table.nbytes
    )


def _ranges(pattern: Pattern, layouts: tuple[Layout, ...], heads: int, kv_heads: int, chunk: int | None) -> Ranges:
    """Build the table. layouts: one for queries and keys, or one for each."""
    n = max(layout.n for layout in layouts)
    if chunk is not None:
        return ranges_of_runs(pattern, [straight_runs(layout) for layout in layouts], n, heads, kv_heads, chunk)
    if any(layout.listed is not None for layout in layouts):
        blocks = blocks_of(replace(pattern, documents=None), n, heads, kv_heads)
        return _listed_ranges(blocks, layouts, DocumentTable.of(pattern.documents, n))
    return ranges_of_runs(pattern, [_runs_of(layout) for layout in layouts], n, heads, kv_heads)


def ranges_of_runs(
    pattern: Pattern, runs_of_each: Sequence[Ints], n: int, heads: int, kv_heads: int, chunk: int | None = None
) -> Ranges:
    """Build the table from runs as `_runs_of` returns them: of both queries and keys, or of each. n: tokens."""
    blocks = blocks_of(replace(pattern, documents=None), n, heads, kv_heads, for_any_length=chunk is not None)
    documents = DocumentTable.of(pattern.documents, n)
    tables = []
    for runs in runs_of_each:
        pieces = Pieces.of(runs, documents)
        for index, block in enumerate(blocks):
            if block.window is None:
                tables.append(_arithmetic_ranges(index, block, pieces, documents))
            else:
                segments = documents.cut(block.whole_segment)
                tables.append(_arithmetic_ranges(index, block, Pieces.of(runs, segments), segments))
    if chunk is not None:
        tables = [_cut_at_chunks(table, documents, chunk) for table in tables]
    columns: dict[str, Any] = {name: concatenated([table[name] for table in tables]) for name in COLUMNS}
    first_key = sum(len(table["rank"]) for table in tables[: len(blocks)]) if len(runs_of_each) > 1 else None
    packed = _packed(blocks, documents)
    return Ranges(blocks, packed=packed, first_key=first_key, chunked=chunk is not None, **columns)


def _packed(blocks: Sequence[Block], documents: DocumentTable) -> bool:
    return len(documents) > 1 or any(block.slices for block in blocks)


def _runs_of(layout: Layout) -> Ints:
    """Return the runs of all ranks, (runs, 5): rank, row, start, step, length. Element e lies at position
    start + e * step, in row `row` + e of the rank.
    """
    table = []
    for rank in range(layout.world_size):
        row = 0
        for run in layout.shard_runs(rank):
            table.append((rank, row, *run))
            row += run.length
    return np.array(table, np.int64).reshape(-1, 5)


def _arithmetic_ranges(index: int, block: Block, pieces: Pieces, documents: DocumentTable) -> dict[str, Ints]:
    """Return the columns of one block's ranges, in the order (segment, rank)."""
    w, r = block.segment_length, block.dilation_rate
    first_segment = pieces.start // w
    segments = (pieces.start + (pieces.length - 1) * pieces.step) // w - first_segment + 1
    which = np.repeat(np.arange(len(segments)), segments)
    piece, segment = pieces.take(which), first_segment[which] + ragged_arange(segments)
    # The piece's elements low .. high - 1 lie in the segment ...
    low = np.maximum(-((piece.start - segment * w) // piece.step), 0)
    high = np.minimum(-((piece.start - (segment + 1) * w) // piece.step), piece.length)
    # ... and every `cycle`-th of these lies on the grid, from the first that `_on_grid` returns, if any does.
    target = segment * w + block.offset - piece.start
    cycle, phase, exists = _on_grid(piece.step, target, r)
    element = low + (phase - low) % cycle
    count = np.where(exists, (high - element + cycle - 1) // cycle, 0)
    segment += documents.first_segment(w)[piece.document]
    columns = {
        "block": np.full_like(segment, index),
        "segment": segment,
        "section": segment if block.window is None else piece.document,
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


def _cut_at_chunks(columns: dict[str, Ints], documents: DocumentTable, chunk: int) -> dict[str, Ints]:
    """Cut ranges where a chunk of their document ends. columns: of ranges within one document each."""
    first, step, count = columns["first"], columns["step"], columns["count"]
    start = first - documents.begin[documents.holding(first)]
    first_chunk = start // chunk
    parts = (start + (count - 1) * step) // chunk - first_chunk + 1
    which = np.repeat(np.arange(len(parts)), parts)
    number, start, step = first_chunk[which] + ragged_arange(parts), start[which], step[which]
    low = np.maximum(-((start - number * chunk) // step), 0)
    high = np.minimum(-((start - (number + 1) * chunk) // step), count[which])
    cut = {name: column[which] for name, column in columns.items()}
    cut |= {"first": cut["first"] + low * step, "row": cut["row"] + low * cut["row_step"], "count": high - low}
    some = np.flatnonzero(high > low)
    return {name: column[some] for name, column in cut.items()}


def _on_grid(step: Ints, target: Ints, rate: int) -> tuple[Ints, Ints, Ints]:
    """Return (cycle, phase, exists): the elements e = phase, phase + cycle, ... of a run lie on a grid, if any exists.

    Element e lies `step * e` after the run's start. The grid's first point lies `target` after it, or before it if
    negative. So e is on the grid if step * e and target differ by a multiple of the dilation rate: step * e = target
    (mod rate). Let divisor be the greatest common divisor of step and rate. There is no solution unless it divides the
    target. If it does, divide all three numbers by it. The reduced step then has an inverse modulo
    cycle = rate / divisor, and e = inverse * target (mod cycle).

    The example's runs have step 1. Other runs, and their positions on the grid 0, rate, 2 * rate, ...:

        start  step  rate  target  cycle  phase  on the grid
        12     1     2     -12     2      0      12 14 16
        1      3     2     -1      2      1      4 10 16
        2      2     6     -2      3      2      6 12 18
        1      2     6     -1      -      -      -
    """
    few, at = np.unique(step, return_inverse=True)  # many pieces share few steps
    divisor = np.gcd(few, rate)
    cycle = rate // divisor
    inverse = _inverses(few // divisor, cycle)[at]
    divisor, cycle = divisor[at], cycle[at]
    phase = _product(target // divisor % cycle, inverse, cycle)
    return cycle, phase, target % divisor == 0


def _product(a: Ints, b: Ints, modulus: Ints) -> Ints:
    """Return a * b % modulus for 0 <= a, b < modulus <= 2^41 + 1, where a * b may not fit into 64 bits.

    Split b = high * 2^21 + low, so that no intermediate number exceeds 2^63.
    """
    high, low = b >> 21, b & (2**21 - 1)
    return ((a * high % modulus << 21) + a * low) % modulus


def _inverses(values: Ints, moduli: Ints) -> Ints:
    """Return the inverse of each value modulo its modulus."""
    pairs = zip(values.tolist(), moduli.tolist(), strict=True)
    return np.array([pow(value, -1, modulus) for value, modulus in pairs], np.int64)


def _listed_ranges(blocks: tuple[Block, ...], layouts: tuple[Layout, ...], documents: DocumentTable) -> Ranges:
    """Build the table of layouts with a listed order, from every selected position."""
    tables, span = [], max(layout.n for layout in layouts) + 1
    for layout in layouts:
        ranks, rows = np.repeat(np.arange(layout.world_size), layout.counts), ragged_arange(np.array(layout.counts))
        ascending = np.lexsort((layout.order, ranks))
        listed, rows = layout.order[ascending], rows[ascending]
        for index, (entry, segment, section) in enumerate(_selected(blocks, listed, documents)):
            rank = ranks[entry]
            begin = np.flatnonzero(group_starts(segment, rank))
            tables.append({
                "block": np.full_like(begin, index), "segment": segment[begin], "section": section[begin],
                "rank": rank[begin],
                "count": np.diff(np.append(begin, len(entry))), "rows": rows[entry], "positions": listed[entry],
            })  # fmt: skip
    columns: dict[str, Any] = {name: concatenated([table[name] for table in tables]) for name in tables[0]}
    rows, positions, count = columns.pop("rows"), columns.pop("positions"), columns["count"]
    begin = np.cumsum(count) - count
    return Ranges(
        blocks,
        row=begin,
        row_step=np.ones_like(begin),
        first=positions[begin],
        step=np.zeros_like(begin),
        listing=Listing(rows, positions, np.repeat(np.arange(len(begin)), count) * span + positions, span),
        packed=_packed(blocks, documents),
        first_key=sum(len(table["rank"]) for table in tables[: len(blocks)]) if len(layouts) > 1 else None,
        **columns,
    )


def _selected(blocks: tuple[Block, ...], position: Ints, documents: DocumentTable) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield, for each block, the indices of the positions that lie on its grid, by segment, and the segment and section
    of each.
    """
    alike: tuple[int, ...] = ()  # blocks that differ only in the offset have the same segments
    for block in blocks:
        if alike != (alike := (block.segment_length, block.dilation_rate, block.whole_segment)):
            table = documents if block.window is None else documents.cut(block.whole_segment)
            document = table.holding(position)
            segment, within = np.divmod(position - table.begin[document], block.segment_length)
            segment += table.first_segment(block.segment_length)[document]
            by_segment = np.argsort(segment, kind="stable")
            segment, phase = segment[by_segment], (within % block.dilation_rate)[by_segment]
            section = segment if block.window is None else document[by_segment]
        some = np.flatnonzero(phase == block.offset)
        yield by_segment[some], segment[some], section[some]


def merge_adjacent(ranges: Ranges, rank: int) -> Ranges:
    """Return the ranges of one rank for attention to its own keys: one range for each block and segment whose ranges
    follow each other both in rows and in positions.

    Between own rows only their order counts, so the positions of a merged range are 0, 1, 2, ... The two halves of a
    zigzag shard then are one causal square: one kernel call instead of three. Windows need distances: not merged. Nor
    are ranges of queries alone, whose order relative to the keys their positions tell.
    """
    if ranges.listing is not None or ranges.first_key is not None:
        return ranges
    own = np.flatnonzero(ranges.rank == rank)
    own = own[np.lexsort((ranges.first[own], ranges.segment[own], ranges.block[own]))]
    chosen = ranges.take(own)
    if not len(own):
        return chosen
    row, step, count = chosen.row, chosen.row_step, chosen.count
    last = chosen.position(np.arange(len(own)), count - 1)
    leads = group_starts(chosen.block, chosen.segment)  # the first range of its block and segment
    follows = leads.copy()
    follows[1:] |= (
        (row[1:] == row[:-1] + count[:-1] * step[:-1]) & (step[1:] == step[:-1]) & (chosen.first[1:] > last[:-1])
    )
    begin, group = np.flatnonzero(leads), np.cumsum(leads) - 1
    several = np.diff(np.append(begin, len(own))) > 1
    merged = (np.logical_and.reduceat(follows, begin) & several)[group] & (chosen.window < 0)
    table = replace(
        chosen,
        count=np.where(merged, np.add.reduceat(count, begin)[group], count),
        first=np.where(merged, 0, chosen.first),
        step=np.where(merged, 1, chosen.step),
    )
    return table.take(np.flatnonzero(leads | ~merged))


def group_starts(*columns: Ints) -> np.ndarray:
    """Return a bool for each entry: True if it starts a group of neighbours that are equal in all columns."""
    starts = np.ones(len(columns[0]), bool)
    if len(starts):
        starts[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return starts


def ragged_arange(counts: Ints) -> Ints:
    """Return 0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, ..."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)


def concatenated(arrays: Sequence[Ints]) -> Ints:
    """Concatenate arrays; an empty sequence gives an empty array."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
