"""Messages and their chunks: the slots of every row.

A slot holds one row of one key/value head of a block, so a row takes as many slots as the block has key/value heads. A
message is a row of slots. A message longer than a bucket is cut into chunks, which are sent one by one.

The example (see `ring.plan`): by `direct` at distance 1 rank 0 takes 4 slots and rank 1 takes 4. In chunks of at most 2
slots, each message would be two chunks:

    reader  range  elements  slot  chunk  slot of the chunk
    0       3      0 1       0     0      0
    0       7      0 1       2     1      0
    1       0      0 1       0     0      0
    1       4      0 1       2     1      0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ring.plan.ranges import Ints, Subranges, concatenated, group_starts, ragged_arange


@dataclass(frozen=True, eq=False)
class SlotRanges:
    """Subranges, the first of the consecutive slots that hold each, row after row, and the number of its message."""

    subranges: Subranges
    slot: Ints
    message: Ints

    def shifted(self, by: int) -> SlotRanges:
        return replace(self, slot=self.slot + by)

    @classmethod
    def join(cls, parts: Sequence[SlotRanges]) -> SlotRanges:
        """Concatenate the slot ranges of all parts, of which there may be none."""
        return cls(
            Subranges.join([part.subranges for part in parts]),
            slot=concatenated([part.slot for part in parts]),
            message=concatenated([part.message for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class Entries:
    """The contents of messages, in order: subranges, the slots of each of their rows, and the hops that they travel
    round the ring (0 for `direct`). whole: none is split between chunks.
    """

    message: Ints
    travel: Ints
    subranges: Subranges
    width: Ints
    whole: bool = False

    def take(self, which: Ints) -> Entries:
        return replace(
            self, message=self.message[which], travel=self.travel[which], subranges=self.subranges.take(which),
            width=self.width[which],
        )  # fmt: skip

    @cached_property
    def slots(self) -> Ints:
        return self.subranges.count * self.width

    @cached_property
    def widest(self) -> int:
        """Most slots that are never split."""
        return int((self.slots if self.whole else self.width).max(initial=1))


@dataclass(frozen=True, eq=False)
class Chunks:
    """Entries, each with its chunk of the message and its first slot in the chunk; in the order (message, chunk)."""

    entries: Entries
    chunk: Ints
    slot: Ints

    @property
    def nbytes(self) -> int:
        """Bytes of eight arrays with a number for each entry."""
        return 8 * self.chunk.nbytes

    @cached_property
    def count(self) -> int:
        """Number of chunks of the longest message."""
        return int(self.chunk.max(initial=-1)) + 1

    def of(self, message: int, chunk: int) -> Ints:
        """Return the indices of the entries in a chunk."""
        low, high = np.searchsorted(self.entries.message, (message, message + 1))
        return np.arange(*low + np.searchsorted(self.chunk[low:high], (chunk, chunk + 1)))

    def slot_ranges(self, which: Ints) -> SlotRanges:
        return SlotRanges(self.entries.subranges.take(which), self.slot[which], self.entries.message[which])


def whole_messages(entries: Entries) -> Chunks:
    """Return every message as one chunk."""
    slots = entries.slots
    begin = np.cumsum(slots) - slots
    return _chunked(entries, np.zeros_like(begin), begin)


def cut(entries: Entries, most: int) -> Chunks:
    """Cut messages into chunks: a row whose first slot is number x of its message goes into chunk x // most.

    Entries of 3 and 2 rows, each row 2 slots wide, and `most` 4: rows begin at slots 0 2 | 4 6 | 8. The chunks hold
    rows 0 1 of the first entry; row 2 of the first and 0 of the second; row 1 of the second. Two entries become four.
    """
    begin, width = whole_messages(entries).slot, entries.width
    if entries.whole:
        return _chunked(entries, begin // most, begin)
    first_chunk = begin // most
    chunks = (begin + entries.slots - width) // most - first_chunk + 1
    which = np.repeat(np.arange(len(chunks)), chunks)
    chunk = first_chunk[which] + ragged_arange(chunks)
    begin, width = begin[which], width[which]
    low = np.maximum(-((begin - chunk * most) // width), 0)  # first row that begins in the chunk
    high = np.minimum(-((begin - (chunk + 1) * most) // width), entries.subranges.count[which])
    some = np.flatnonzero(high > low)
    which, chunk, low, high = which[some], chunk[some], low[some], high[some]
    begin = begin[some] + low * width[some]
    entries = entries.take(which)
    return _chunked(replace(entries, subranges=entries.subranges.part(low, high - low)), chunk, begin)


def _chunked(entries: Entries, chunk: Ints, begin: Ints) -> Chunks:
    """Return entries with their chunks. begin: first slot of each in its message."""
    new = group_starts(entries.message, chunk)
    return Chunks(entries, chunk, begin - begin[new][np.cumsum(new) - 1])


def buffer_slots(slots: int, most: int, widest: int) -> int:
    """Return the most slots that a chunk of a message takes. widest: slots that are never split, such as a row's."""
    return min(slots, most + widest - 1)
