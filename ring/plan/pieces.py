"""Packed documents: runs cut into pieces, each within one document.

Segments and phases restart in every document. So the rest of the plan works on pieces of runs, whose positions are
counted from the start of their document; a piece stores that start. Segments are numbered through all documents, in
ascending order of position. From there on documents are segments like any others.

The example (see `ring.plan`) has one document, and its runs are their own pieces. With documents=(3, 1, 0, 12) the runs
of rank 0 would be these; document 2 is empty, so it has neither a piece nor a number:

    run               document  origin  start  length  positions
    0 1 2 3           0         0       0      3       0 1 2
    0 1 2 3           1         3       0      1       3
    12 13 14 15       2         4       8      4       12 13 14 15
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ints = np.ndarray  # int64


@dataclass(frozen=True, eq=False)
class DocumentTable:
    """Begin and end of the documents, in order, without empty ones.

    gap: numbers skipped between the segments of one document and those of the next.
    """

    begin: Ints
    end: Ints
    gap: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int] | None, n: int) -> DocumentTable:
        """Build the table of documents with n tokens in total; without lengths there is one document."""
        counts = np.array((n,) if lengths is None else lengths, np.int64)
        counts = counts[counts > 0]
        end = np.cumsum(counts)
        return cls(end - counts, end)

    def __len__(self) -> int:
        return len(self.begin)

    def holding(self, position: Ints) -> Ints:
        """Return the document of each position."""
        return np.searchsorted(self.end, position, side="right")

    def first_segment(self, length: int) -> Ints:
        """Return the number of each document's first segment, for segments of `length` tokens numbered through."""
        segments = self.gap - (self.begin - self.end) // length
        return np.cumsum(segments) - segments

    def cut(self, length: int) -> DocumentTable:
        """Return the segments of `length` tokens as documents of their own. Their segments have a gap of one number, so
        that neighbours in number are neighbours in one document.
        """
        count = -((self.begin - self.end) // length)
        which = np.repeat(np.arange(len(count)), count)
        begin = self.begin[which] + (np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)) * length
        return DocumentTable(begin, np.minimum(begin + length, self.end[which]), gap=1)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of runs within one document. Element e, 0 <= e < length, is in row `row` + e of the rank, at position
    start + e * step of the document that begins at `origin`: at origin + start + e * step of all tokens.
    """

    rank: Ints
    row: Ints
    start: Ints
    step: Ints
    length: Ints
    origin: Ints
    document: Ints

    @classmethod
    def of(cls, runs: Ints, documents: DocumentTable) -> Pieces:
        """Cut runs, (runs, 5): rank, row, start, step, length. Pieces are in the order of runs, then positions."""
        rank, row, start, step, length = runs.T
        first = documents.holding(start)
        parts = documents.holding(start + (length - 1) * step) - first + 1
        which = np.repeat(np.arange(len(parts)), parts)
        document = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
        origin, start, step = documents.begin[document], start[which], step[which]
        low = np.maximum(-((start - origin) // step), 0)
        high = np.minimum(-((start - documents.end[document]) // step), length[which])
        whole = cls(rank[which], row[which] + low, start + low * step - origin, step, high - low, origin, document)
        return whole.take(np.flatnonzero(high > low))  # a run may step over a short document

    def take(self, which: Ints) -> Pieces:
        return Pieces(
            self.rank[which], self.row[which], self.start[which], self.step[which], self.length[which],
            self.origin[which], self.document[which],
        )  # fmt: skip
