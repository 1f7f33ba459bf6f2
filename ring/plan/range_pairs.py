"""Which pieces see which: the join of query pieces with key pieces on (block, segment), trimmed by causality.

Integers only. A meeting names a stretch of elements of a query piece and of a key piece and the mask between them;
every query row of it sees at least one of its keys and every key is seen by at least one of its query rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from ring.plan.ranges import Ints, Pieces, counter


class Mask(IntEnum):
    """What the query rows of a tile see of its keys."""

    FULL = 0  # everything
    CAUSAL = 1  # square; row i sees the keys j <= i
    POSITION = 2  # row i sees the keys whose position is not beyond its own


@dataclass(frozen=True, eq=False)
class Stretches:
    """Elements first .. first + count - 1 of pieces."""

    piece: Ints
    first: Ints
    count: Ints

    @classmethod
    def whole(cls, pieces: Pieces, which: Ints) -> Stretches:
        return cls(which, np.zeros_like(which), pieces.count[which])

    def take(self, which: Ints) -> Stretches:
        return Stretches(self.piece[which], self.first[which], self.count[which])

    def part(self, skip: Ints, count: Ints) -> Stretches:
        return Stretches(self.piece, self.first + skip, count)

    def cut(self, most: int) -> tuple[Stretches, Ints]:
        """The same in stretches of at most so many elements, and the index of the stretch that each is part of."""
        parts = -(-self.count // most)
        which = np.repeat(np.arange(len(parts)), parts)
        skip, whole = counter(parts) * most, self.take(which)
        return whole.part(skip, np.minimum(whole.count - skip, most)), which


@dataclass(frozen=True, eq=False)
class Meetings:
    """Pairs of stretches, as `query` and `key` side by side; `item` is the index of the key stretch that was joined."""

    query: Stretches
    key: Stretches
    item: Ints

    def take(self, which: Ints) -> Meetings:
        return Meetings(self.query.take(which), self.key.take(which), self.item[which])

    def part(self, q_skip: Ints, q_count: Ints, k_skip: Ints, k_count: Ints) -> Meetings:
        return Meetings(self.query.part(q_skip, q_count), self.key.part(k_skip, k_count), self.item)


def meet(pieces: Pieces, queries: Stretches, keys: Stretches, causal: bool) -> Meetings:
    """All pairs of a block and segment in which something is visible, trimmed to it. `keys` in order of piece."""
    span = int(pieces.segment.max(initial=0)) + 1
    group = pieces.block * span + pieces.segment
    key_group, query_group = group[keys.piece], group[queries.piece]
    low = np.searchsorted(key_group, query_group, side="left")
    pairs = np.searchsorted(key_group, query_group, side="right") - low
    item = np.repeat(low, pairs) + counter(pairs)
    found = Meetings(queries.take(np.repeat(np.arange(len(pairs)), pairs)), keys.take(item), item)
    return _trim(pieces, found) if causal else found


def _trim(pieces: Pieces, found: Meetings) -> Meetings:
    """Drop the keys beyond the last query row, then the query rows before the first key."""
    q, k = found.query, found.key
    last_row = pieces.position(q.piece, q.first + q.count - 1)
    visible = np.clip(pieces.count_until(k.piece, last_row) - k.first, 0, k.count)
    some = np.flatnonzero(visible)
    found, visible = found.take(some), visible[some]
    q, k = found.query, found.key
    first_key = pieces.position(k.piece, k.first)
    blind = np.maximum(pieces.count_until(q.piece, first_key - 1) - q.first, 0)
    return found.part(blind, q.count - blind, 0 * visible, visible)


def masked(pieces: Pieces, found: Meetings, causal: bool) -> list[tuple[Mask, Meetings]]:
    """The meetings cut so that each part has one of the three masks.

    Two arithmetic pieces of one step meet along a diagonal: row i sees the keys j <= i + c with c >= 0 once trimmed.
    That is c keys seen by every row, a causal square of t rows and keys, and the rows below the square, which see it
    whole.
    """
    if not causal:
        return [(Mask.FULL, found)]
    q, k = found.query, found.key
    first_row = pieces.position(q.piece, q.first)
    full = pieces.position(k.piece, k.first + k.count - 1) <= first_row
    if pieces.listed:
        return [(Mask.FULL, found.take(np.flatnonzero(full))), (Mask.POSITION, found.take(np.flatnonzero(~full)))]
    aligned = pieces.step[q.piece] == pieces.step[k.piece]
    parts = [
        (Mask.FULL, found.take(np.flatnonzero(full))),
        (Mask.POSITION, found.take(np.flatnonzero(~full & ~aligned))),
    ]
    which = np.flatnonzero(~full & aligned)
    found, first_row = found.take(which), first_row[which]
    q, k = found.query, found.key
    before = (first_row - pieces.position(k.piece, k.first)) // pieces.step[k.piece]  # c
    square = k.count - before  # t
    zero = np.zeros_like(square)
    left = found.part(zero, q.count, zero, before)
    diagonal = found.part(zero, square, before, square)
    below = found.part(square, q.count - square, before, square)
    return [
        *parts,
        (Mask.FULL, left.take(np.flatnonzero(before))),
        (Mask.CAUSAL, diagonal),
        (Mask.FULL, below.take(np.flatnonzero(q.count > square))),
    ]


@dataclass(frozen=True, eq=False)
class Needs:
    """Sparse: rank `rank[e]` needs the first `count[e]` elements of the piece `piece[e]`, which another rank holds."""

    rank: Ints
    piece: Ints
    count: Ints


@lru_cache(maxsize=16)
def needs_of(pieces: Pieces, causal: bool) -> Needs:
    """What every rank needs of every other: prefixes, as whoever sees a key sees all before it in its piece."""
    everything = Stretches.whole(pieces, np.arange(len(pieces.count)))
    found = meet(pieces, everything, everything, causal)
    reader = pieces.rank[found.query.piece]
    remote = np.flatnonzero(reader != pieces.rank[found.key.piece])
    reader, piece, count = reader[remote], found.key.piece[remote], found.key.count[remote]
    order = np.lexsort((piece, reader))
    reader, piece, count = reader[order], piece[order], count[order]
    new = np.ones(len(piece), bool)
    new[1:] = (np.diff(reader) != 0) | (np.diff(piece) != 0)
    begin = np.flatnonzero(new)
    most = np.maximum.reduceat(count, begin) if len(begin) else count
    return Needs(reader[begin], piece[begin], most)
