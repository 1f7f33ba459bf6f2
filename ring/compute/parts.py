"""Partial results as they are kept on GPUs until they are merged, and what each covers, as integers.

One entry for each head of a part: addresses, and the grid of its rows. `ring.compute.combine` reads them on the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.plan.blocks import Heads
from ring.plan.ranges import Ints
from ring.plan.rows import Rows

FIELDS = 16
_ALIGNMENT = 16  # bytes of the widest load


@dataclass(frozen=True, eq=False)
class Part:
    """A partial result, (F, B, groups, per_group, L, D), and the rows and heads that it is for."""

    rows: Rows
    heads: Heads
    out: torch.Tensor
    lse: torch.Tensor | None


def whole(plain: Accumulator | Sum) -> Part:
    _, tokens, heads, _ = plain.out.shape
    out = plain.out.transpose(1, 2)[None, :, :, None]
    lse = plain.lse[None, :, :, None] if isinstance(plain, Accumulator) else None
    return Part(Rows(0, 1, tokens), Heads(heads, 1, 0, 1, 1), out, lse)


def as_output(part: Part, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A part as the (B, N, H, D) output that it becomes: of that type, for every row and head, laid out like an output,
    and alone in its memory, as what comes from a kernel. None if it is none.
    """
    rows, heads, out = part.rows, part.heads, part.out
    _, tokens, count, _ = like.shape
    by_row = rows.index is None and (rows.start, rows.step, rows.head_step) == (0, 1, 0)
    by_row &= rows.folds * rows.length == tokens and (rows.folds == 1 or rows.fold_step == rows.length)
    by_head = np.array_equal(np.reshape(heads.listed(), -1), np.arange(count))
    laid = out.permute(1, 0, 4, 2, 3, 5)  # (B, F, L, G, P, D)
    alone = laid.is_contiguous() and out.untyped_storage().nbytes() == out.nbytes
    return laid.reshape(like.shape) if out.dtype == dtype and alone and by_row and by_head else None


def is_grid(rows: Rows, heads: Heads, tile: torch.Tensor) -> bool:
    """Whether a row's place on the grid can be computed: fold by fold, one after the other."""
    if rows.index is not None or heads.ids is not None or tile.stride(5) != 1:
        return False
    return rows.folds == 1 or rows.fold_step > (rows.length - 1) * rows.step


def entries_of(part: Part, apart: int) -> Ints:
    """(heads, 1 + fields): the head, then its entry."""
    out, lse = part.out, part.lse
    by_lse = None if lse is None else (lse.stride(), lse.element_size())
    table = _grid(part.rows, part.heads, out.stride(), out.element_size(), by_lse, apart).copy()
    table[:, 1] += out.data_ptr()
    if lse is not None:
        table[:, 2] += lse.data_ptr()
    table[:, 15] = out.dtype == torch.float32
    return table


@lru_cache(maxsize=4096)
def _grid(
    rows: Rows, heads: Heads, out: tuple[int, ...], size: int, lse: tuple[tuple[int, ...], int] | None, apart: int
) -> Ints:
    """Entries of a part with addresses from 0 on: made once for a plan's tile. out, lse: strides."""
    group, member = np.divmod(np.arange(heads.groups * heads.per_group), heads.per_group)
    table = np.zeros((len(group), FIELDS + 1), np.int64)
    table[:, 0] = heads.start + group * heads.step + member * heads.inner
    fold, batch, by_group, by_member, by_row, _ = out
    table[:, 1] = (group * by_group + member * by_member) * size
    table[:, 3] = rows.start + group * rows.head_step
    table[:, 4] = table[:, 3] + (rows.folds - 1) * rows.fold_step + (rows.length - 1) * rows.step + 1
    table[:, 5:9] = rows.step, rows.length, rows.fold_step if rows.folds > 1 else 2**30, rows.folds
    table[:, 9:12] = fold, batch, by_row
    if lse is not None:
        (fold, batch, by_group, by_member, by_row), size = lse
        table[:, 2] = (group * by_group + member * by_member) * size
        table[:, 12:15] = fold, batch, by_row
    table[:, 16] = math.gcd(rows.step, apart, *([rows.fold_step] if rows.folds > 1 else []))
    return table


def is_aligned(x: torch.Tensor) -> bool:
    steps = [
        x.data_ptr(),
        *(stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1),
    ]
    return all(step % _ALIGNMENT == 0 for step in steps)
