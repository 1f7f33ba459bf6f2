"""Partial results on GPUs before they are merged: their rows and heads, strides and alignment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import is_everything

# Merge partial results when they hold this many times the bytes of an fp32 accumulator.
MAX_PENDING = 2.0

_ALIGNMENT = 16  # bytes of the widest load


@dataclass(frozen=True, eq=False)
class Part:
    """A partial result, (F, B, groups, per_group, L, D), with its rows and heads."""

    rows: Rows
    heads: Heads
    out: torch.Tensor
    lse: torch.Tensor | None


def whole(plain: Accumulator | Sum) -> Part:
    _, tokens, heads, _ = plain.out.shape
    out = plain.out.transpose(1, 2)[None, :, :, None]
    lse = plain.lse[None, :, :, None] if isinstance(plain, Accumulator) else None
    return Part(_all(tokens), Heads(heads, 1, 0, 1, 1), out, lse)


@lru_cache(maxsize=64)
def _all(tokens: int) -> Rows:
    """Return one object for all calls: caches distinguish rows by identity."""
    return Rows(0, 1, tokens)


def as_output(part: Part, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a part as a (B, N, H, D) output if it can become one: of that type, for every row and head, laid out like
    an output, and the only tensor in its storage, like a kernel's result. Else None.
    """
    out = part.out
    if out.dtype != dtype or not _laid_like(part.rows, part.heads, out.shape, out.stride(), like.shape):
        return None
    alone = out.untyped_storage().nbytes() == out.nbytes
    return out.as_strided(like.shape, _contiguous(like.shape)) if alone else None


@lru_cache(maxsize=4096)
def _laid_like(
    rows: Rows, heads: Heads, sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]
) -> bool:
    """Return True if a part of these sizes and strides covers all of `shape` and is laid out like it."""
    _, tokens, count, _ = shape
    order = (1, 0, 4, 2, 3, 5)  # (B, F, L, G, P, D)
    expected = _contiguous(tuple(sizes[dim] for dim in order))
    contiguous = all(sizes[dim] == 1 or strides[dim] == step for dim, step in zip(order, expected, strict=True))
    return contiguous and is_everything(rows, heads, tokens, count)


@lru_cache(maxsize=256)
def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    steps = [1]
    for size in sizes[:0:-1]:
        steps.append(steps[-1] * max(size, 1))
    return tuple(steps[::-1])


def takes_part(rows: Rows, heads: Heads, tile: torch.Tensor) -> bool:
    """Return True if the merge kernel can locate rows: they are listed, or folds do not interleave."""
    if heads.ids is not None or tile.stride(5) != 1:
        return False
    return rows.index is not None or rows.folds == 1 or rows.fold_step > (rows.length - 1) * rows.step


def is_aligned(x: torch.Tensor) -> bool:
    steps = [
        x.data_ptr(),
        *(stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1),
    ]
    return all(step % _ALIGNMENT == 0 for step in steps)
