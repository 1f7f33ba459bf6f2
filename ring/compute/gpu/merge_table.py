"""The table of partial results for the merge kernel, `ring.compute.gpu.merge_kernel`, which reads it on the GPU. It has
an entry, a row of integers, for each head of a partial result: its addresses and the grid of its rows. Before the
entries are the index of each head's first one and, where some have no program, the lanes.

Place i of fold f is row start + f * fold_step + i * step of the output, or a listed row. Its numbers lie at
out + f * out_fold + batch * out_batch + i * out_row.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto
from functools import lru_cache

import numpy as np
import torch

from ring.caching.weak_cache import cached_on
from ring.compute.gpu.partial_results import Part
from ring.plan.blocks import Heads
from ring.plan.ranges import Ints
from ring.plan.rows import Rows

_UNBOUNDED = 2**30  # rows: the fold step of a single fold


class Field(IntEnum):
    """The columns of the table. Strides count numbers, not bytes."""

    OUT = 0  # address of the first number for the head
    LSE = auto()  # the same of lse, in fp32; 0 if there is none
    START = auto()  # first row
    END = auto()  # one past the last row
    STEP = auto()  # between the rows of a fold
    LENGTH = auto()  # rows of a fold
    FOLD_STEP = auto()  # between the first rows of folds
    FOLDS = auto()
    OUT_FOLD = auto()  # strides of the numbers
    OUT_BATCH = auto()
    OUT_ROW = auto()
    LSE_FOLD = auto()  # strides of lse
    LSE_BATCH = auto()
    LSE_ROW = auto()
    IS_FP32 = auto()  # 1 if the numbers are fp32, 0 if they are of the 16-bit type
    DIVISOR = auto()  # divides STEP, FOLD_STEP and the distance of the rows of a kernel program
    PLACES = auto()  # address of a table of listed rows, from START on (`list_places`); 0 if they are not listed


def make_entries(part: Part, row_step: int) -> tuple[Ints, Ints]:
    """Return heads (h,) and their entries (h, fields), with addresses relative to the part's. row_step: distance
    of the rows of a kernel program.
    """
    out, lse = part.out, part.lse
    by_lse = None if lse is None else (lse.stride(), lse.element_size())
    heads, table = _grid(part.rows, part.heads, out.stride(), out.element_size(), by_lse, row_step)
    table = table.copy()
    table[:, Field.IS_FP32] = out.dtype == torch.float32
    if part.rows.index is not None:
        table[:, Field.PLACES] = list_places(part.rows, out.device).data_ptr()
    return heads, table


def list_lanes(heads: Ints, entries: Ints, row_step: int, count: int) -> Ints:
    """Return the lanes whose rows some entry may hold: (number of the first row, below row_step) * count + head.

    Args:
        heads: of the entries, (entries,).
        entries: of the table, (entries, fields).
        row_step: distance of the rows of a kernel program.
        count: of all heads.
    """
    row = np.arange(row_step)[:, None]
    held = (row - entries[:, Field.START]) % entries[:, Field.DIVISOR] == 0
    return np.unique((row * count + heads)[held])


@cached_on
def list_places(rows: Rows, device: torch.device) -> torch.Tensor:
    """Return the place in the tile, fold * length + place, of every row from the first listed one to the last; -1 for
    rows that are not listed. int32.
    """
    listed = rows.listed().ravel()
    places = np.full(listed.max() - listed.min() + 1, -1, np.int32)
    places[listed - listed.min()] = np.arange(len(listed))
    return torch.from_numpy(places).to(device)


@lru_cache(maxsize=4096)
def _grid(
    rows: Rows, heads: Heads, out: tuple[int, ...], size: int, lse: tuple[tuple[int, ...], int] | None, row_step: int
) -> tuple[Ints, Ints]:
    """Compute `make_entries` of a tile once. out, lse: strides; size: bytes of a number; lse also has its own."""
    group, member = np.divmod(np.arange(heads.groups * heads.per_group), heads.per_group)
    table = np.zeros((len(group), len(Field)), np.int64)
    first, last = _ends(rows)
    table[:, Field.START] = first + group * rows.head_step
    table[:, Field.END] = last + 1 + group * rows.head_step
    table[:, Field.STEP] = rows.step
    table[:, Field.LENGTH] = rows.length
    table[:, Field.FOLD_STEP] = rows.fold_step if rows.folds > 1 else _UNBOUNDED
    table[:, Field.FOLDS] = rows.folds
    fold, batch, by_group, by_member, by_row, _ = out
    table[:, Field.OUT] = (group * by_group + member * by_member) * size
    table[:, [Field.OUT_FOLD, Field.OUT_BATCH, Field.OUT_ROW]] = fold, batch, by_row
    if lse is not None:
        (fold, batch, by_group, by_member, by_row), size = lse
        table[:, Field.LSE] = (group * by_group + member * by_member) * size
        table[:, [Field.LSE_FOLD, Field.LSE_BATCH, Field.LSE_ROW]] = fold, batch, by_row
    steps = (1,) if rows.index is not None else (rows.step, rows.fold_step) if rows.folds > 1 else (rows.step,)
    table[:, Field.DIVISOR] = math.gcd(row_step, *steps)
    return heads.start + group * heads.step + member * heads.inner, table


def _ends(rows: Rows) -> tuple[int, int]:
    """Return the first and the last row."""
    if rows.index is not None:
        return int(rows.index.min()), int(rows.index.max())
    return rows.start, rows.start + (rows.folds - 1) * rows.fold_step + (rows.length - 1) * rows.step
