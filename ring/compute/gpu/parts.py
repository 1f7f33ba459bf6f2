"""Partial results as they are kept on GPUs until they are merged: what each covers, and what its memory allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import is_everything

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
    if out.dtype != dtype or not is_everything(rows, heads, tokens, count):
        return None
    laid = out.permute(1, 0, 4, 2, 3, 5)  # (B, F, L, G, P, D)
    alone = laid.is_contiguous() and out.untyped_storage().nbytes() == out.nbytes
    return laid.reshape(like.shape) if alone else None


def is_grid(rows: Rows, heads: Heads, tile: torch.Tensor) -> bool:
    """Whether a row's place on the grid can be computed: fold by fold, one after the other."""
    if rows.index is not None or heads.ids is not None or tile.stride(5) != 1:
        return False
    return rows.folds == 1 or rows.fold_step > (rows.length - 1) * rows.step


def is_aligned(x: torch.Tensor) -> bool:
    steps = [
        x.data_ptr(),
        *(stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1),
    ]
    return all(step % _ALIGNMENT == 0 for step in steps)
