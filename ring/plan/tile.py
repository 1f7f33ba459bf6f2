"""One kernel call: query rows of the own shard against keys.

The example (see `ring.plan`): rank 0 attends to its own keys in one call. This is its part for head 0, before
`ring.plan.diagonal` merges both heads. Fold 0 is segment 0, fold 1 is segment 1; in each, row i sees keys j <= i.

    mask    query heads  key heads  query rows of fold 0  query rows of fold 1  key rows of fold 0  key rows of fold 1
    CAUSAL  0            0          0 2                   4 6                   0 2                 4 6

In the only step, head 0 reads the keys 8 and 10 of rank 1 in slots 0 and 1 of the receive buffer. Its rows 4 and 6 are
the positions 12 and 14, so they see both.

    mask    query heads  key heads  query rows of fold 0  key rows of fold 0
    FULL    0            0          4 6                   0 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from ring.plan.blocks import Heads
from ring.plan.ranges import Ints
from ring.plan.rows import Rows


class Mask(IntEnum):
    """Keys of a tile that its query rows see."""

    FULL = 0  # everything
    CAUSAL = 1  # as many rows as keys; row i sees the keys j <= i
    ANTICAUSAL = 2  # as many rows as keys; row i sees the keys j >= i; for kernels that take windows
    POSITION = 3  # row i sees the keys at positions up to its own


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of a variable-length call: rows query[s] .. query[s + 1] - 1 of the tile see, under its mask, only the
    keys key[s] .. key[s + 1] - 1. Both arrays begin with 0; no sequence is empty.
    """

    query: Ints
    key: Ints

    @classmethod
    def of(cls, queries: Ints, keys: Ints) -> Sequences:
        """Build from the numbers of rows and keys of each sequence."""
        return cls(*(np.concatenate(([0], np.cumsum(lengths))) for lengths in (queries, keys)))

    @property
    def longest(self) -> tuple[int, int]:
        """Most rows and most keys of a sequence."""
        return int(np.diff(self.query).max()), int(np.diff(self.key).max())

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Iterate over the rows and keys of each sequence."""
        edges = [(x[:-1].tolist(), x[1:].tolist()) for x in (self.query, self.key)]
        return zip(*(map(slice, *both) for both in edges), strict=True)

    @property
    def key_bytes(self) -> tuple[bytes, bytes]:
        """Key that is equal for equal sequences."""
        return self.query.tobytes(), self.key.tobytes()


class Node(NamedTuple):
    """A node of the binary tree over the parts 0, 1, ...: it holds those from number 2^level on, 2^level at most."""

    level: int
    number: int

    @property
    def parent(self) -> Node:
        return Node(self.level + 1, self.number // 2)

    @property
    def sibling(self) -> Node:
        return Node(self.level, self.number ^ 1)

    def is_root(self, parts: int) -> bool:
        """Return True if it holds all of so many parts."""
        return self.number == 0 and 1 << self.level >= parts

    def is_alone(self, parts: int) -> bool:
        """Return True if no part is in its sibling, to the right: then its parent is the same."""
        return self.number % 2 == 0 and (self.number + 1) << self.level >= parts


@dataclass(frozen=True, eq=False)
class SumTree:
    """The tree in which the results of a range are summed, for a set of its heads (`ring.plan.parts`).

    rows, heads: of the shard, for a range of the own shard. alone: these heads are in no other block, so that no other
    tree has results of the same rows.
    """

    rows: Rows
    heads: Heads
    parts: int
    block: int
    alone: bool


class Leaf(NamedTuple):
    """The place of a tile's results in a tree: the number of its part, and the first of the tree's rows that it has."""

    tree: SumTree
    number: int
    first: int


class Part(NamedTuple):
    """The places of a tile's results: those of its query rows, and the gradients of its keys."""

    query: Leaf
    key: Leaf


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows against key rows, folded over segments, for heads that share them.

    Before the first step `key_rows` are rows of the own shard and `key_heads` its heads; afterwards they are slots of
    the step's receive buffer and their columns. Positions, (folds, rows) int64, exist if the mask is POSITION. A tile
    with sequences has one fold and a mask other than POSITION. With a window a tile has as many rows as keys in each
    sequence, and row i sees, under its mask, only the keys i - window <= j <= i + window.
    """

    query_rows: Rows
    key_rows: Rows
    query_heads: Heads
    key_heads: Heads
    mask: Mask
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    sequences: Sequences | None = None
    window: int | None = None
    part: Part | None = None  # with `same_bits`

    @property
    def is_triangle(self) -> bool:
        """True if each row sees one key more, or one less, than the row before."""
        return self.mask in (Mask.CAUSAL, Mask.ANTICAUSAL)

    @property
    def needs_window(self) -> bool:
        """True for a tile that only a kernel with windows takes."""
        return self.window is not None or self.mask is Mask.ANTICAUSAL

    @property
    def scores(self) -> int:
        """Scores of a batch entry that its call computes."""
        rows, keys = np.array([[self.query_rows.length], [self.key_rows.length]])
        if self.sequences is not None:
            rows, keys = np.diff(self.sequences.query), np.diff(self.sequences.key)
        if self.window is not None:
            reach = np.minimum(self.window, rows - 1)
            pairs = rows * (reach + 1) - reach * (reach + 1) // 2
            pairs = pairs if self.is_triangle else 2 * pairs - rows
        else:
            pairs = rows * (rows + 1) // 2 if self.is_triangle else rows * keys
        return int(pairs.sum()) * self.query_rows.folds * self.query_heads.groups * self.query_heads.per_group

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        positions = sum(x.nbytes for x in (self.query_positions, self.key_positions) if x is not None)
        sequences = 0 if self.sequences is None else 2 * self.sequences.query.nbytes
        return self.query_rows.nbytes + self.key_rows.nbytes + positions + sequences


def is_everything(rows: Rows, heads: Heads, tokens: int, count: int) -> bool:
    """Return True if these are all rows of a shard of `tokens` rows and all of `count` heads, both in order."""
    return (
        rows.folds * rows.length == tokens
        and heads.groups * heads.per_group == count
        and rows.index is None
        and heads.ids is None
        and rows.start == heads.start == rows.head_step == 0
        and rows.step == 1
        and (rows.folds == 1 or rows.fold_step == rows.length)
        and (heads.groups == 1 or heads.step == heads.per_group)
        and (heads.per_group == 1 or heads.inner == 1)
    )
