"""One kernel call: some query rows of the own shard against some keys.

The example (see `ring.plan`): rank 0 attends to its own keys in one call. This is its part for head 0, before
`ring.plan.diagonal` puts both heads into one; fold 0 is segment 0, fold 1 is segment 1. In each row i sees keys j <= i.

    mask    query heads  key heads  query rows of fold 0  query rows of fold 1  key rows of fold 0  key rows of fold 1
    CAUSAL  0            0          0 2                   4 6                   0 2                 4 6

In the one step after it, head 0 reads the keys 8 and 10, which rank 1 has sent, in slots 0 and 1 of the receive buffer.
Its rows 4 and 6 are the positions 12 and 14, so they see both.

    mask    query heads  key heads  query rows of fold 0  key rows of fold 0
    FULL    0            0          4 6                   0 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from ring.plan.blocks import Heads
from ring.plan.ranges import Ints
from ring.plan.rows import Rows


class Mask(IntEnum):
    """What the query rows of a tile see of its keys."""

    FULL = 0  # everything
    CAUSAL = 1  # as many rows as keys; row i sees the keys j <= i
    POSITION = 2  # row i sees the keys whose position is not beyond its own


@dataclass(frozen=True, eq=False)
class Sequences:
    """What a variable-length call computes: sequence s is the rows query[s] .. query[s + 1] - 1 of the tile and sees,
    as the mask has it, of the keys key[s] .. key[s + 1] - 1 alone. Both begin with 0; none is empty.
    """

    query: Ints
    key: Ints

    @classmethod
    def of(cls, queries: Ints, keys: Ints) -> Sequences:
        """Of so many rows and keys, sequence by sequence."""
        return cls(*(np.concatenate(([0], np.cumsum(lengths))) for lengths in (queries, keys)))

    @property
    def longest(self) -> tuple[int, int]:
        """Most rows, and most keys, of a sequence."""
        return int(np.diff(self.query).max()), int(np.diff(self.key).max())

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The rows and the keys of each."""
        edges = [(x[:-1].tolist(), x[1:].tolist()) for x in (self.query, self.key)]
        return zip(*(map(slice, *both) for both in edges), strict=True)

    @property
    def described(self) -> tuple[bytes, bytes]:
        """Equal for equal sequences."""
        return self.query.tobytes(), self.key.tobytes()


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows against key rows, folded over segments, for heads that share them.

    `key_rows` are rows of the own shard before the first step, slots of the step's receive buffer afterwards;
    `key_heads` likewise are heads of the shard, or columns of the slots. Positions, (folds, rows) int64, are there
    where the mask asks for them. A tile with sequences has one fold, and another mask than POSITION.
    """

    query_rows: Rows
    key_rows: Rows
    query_heads: Heads
    key_heads: Heads
    mask: Mask
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    sequences: Sequences | None = None

    @property
    def nbytes(self) -> int:
        """About what it takes."""
        positions = sum(x.nbytes for x in (self.query_positions, self.key_positions) if x is not None)
        sequences = 0 if self.sequences is None else 2 * self.sequences.query.nbytes
        return self.query_rows.nbytes + self.key_rows.nbytes + positions + sequences


def is_everything(rows: Rows, heads: Heads, tokens: int, count: int) -> bool:
    """Whether these are all rows of a shard of so many tokens, and all of so many heads, both in order."""
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
