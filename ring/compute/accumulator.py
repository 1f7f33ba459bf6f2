"""The log-sum-exp merge: partial results of any kind into one accumulator per query row."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import is_everything
from ring.precision import accumulator_dtype
from ring.strided_view import GradientSum, StridedView


def merge(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two softmax averages over disjoint multisets of keys. out: (..., D), lse: (...); returns the same.

    A side without keys has lse -inf and weight 0; two such sides give out 0 and lse -inf. The weights are exponentials
    of differences from the larger lse, so no finite score overflows. They are divided by their sum, so that a chain of
    merges stays an average. NaN and +inf propagate as in plain arithmetic.
    """
    top = torch.maximum(lse, new_lse)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight, new_weight = torch.exp(lse - top), torch.exp(new_lse - top)
    total = weight + new_weight
    share = total.masked_fill(total == 0.0, 1.0)
    merged = (weight / share).unsqueeze(-1) * out + (new_weight / share).unsqueeze(-1) * new_out
    return merged, top + torch.log(total)


class OutputMerge(Protocol):
    """Output and lse of the own query rows, merged from partial results."""

    def merge(self, rows: Rows, heads: Heads, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result. out: (F, B, groups, per_group, L, D); lse the same without D."""
        ...

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse): (B, N, H, D) in `dtype`, and (B, H, N)."""
        ...


class TensorSum(GradientSum, Protocol):
    """A sum shaped like a (B, N, H, D) tensor."""

    def __init__(self, like: torch.Tensor) -> None: ...

    @staticmethod
    def results(sums: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return each sum in `dtype`. sums: all of this class."""
        ...


class Accumulator:
    """Output (B, N, H, D) and lse (B, H, N) of the own query rows, initially 0 and -inf: no key seen. With sinks, (H,),
    lse is initially that of the head: every row has seen one key of this score and value 0. Without, a first partial
    result that covers everything is not copied until the next one. like: a tensor with the output's shape.
    """

    def __init__(self, like: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self._like = like
        self._dtype = accumulator_dtype(like.dtype)
        self._only: tuple[torch.Tensor, torch.Tensor] | None = None
        self._begun = False
        if sinks is not None:
            self.lse.copy_(sinks[:, None])

    def begin(self) -> None:
        """Make the memory of the results, which a first partial result otherwise spares."""
        if self._begun:
            return
        batch, tokens, heads, dim = self._like.shape
        dtype, device = self._dtype, self._like.device
        self._out_tensor = torch.zeros(batch, tokens, heads, dim, dtype=dtype, device=device)
        self._lse_tensor = torch.full((batch, heads, tokens), -torch.inf, dtype=dtype, device=device)
        self._out, self._lse = StridedView(self._out_tensor), lse_view(self._lse_tensor)
        self._begun = True
        if self._only is not None:
            out, lse = self._only
            self._out_tensor.copy_(as_shard(out))
            self._lse_tensor.copy_(_lse_as_shard(lse))
            self._only = None

    @property
    def out(self) -> torch.Tensor:
        if not self._begun:
            self.begin()
        return self._out_tensor

    @property
    def lse(self) -> torch.Tensor:
        if not self._begun:
            self.begin()
        return self._lse_tensor

    def merge(self, rows: Rows, heads: Heads, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result. out: (F, B, groups, per_group, L, D); lse the same without D."""
        if not self._begun:
            _, tokens, count, _ = self._like.shape
            if self._only is None and is_everything(rows, heads, tokens, count):
                self._only = out, lse
                return
            self.begin()
        old_lse = self._lse.view(rows, heads).squeeze(-1)
        merged, merged_lse = merge(self._out.view(rows, heads), old_lse, out, lse)
        self._out.put(rows, heads, merged)
        self._lse.put(rows, heads, merged_lse.unsqueeze(-1))

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), out in `dtype`."""
        if self._only is None:
            return self.out.to(dtype), self.lse
        out, lse = self._only
        return as_shard(out).to(dtype).contiguous(), _lse_as_shard(lse).contiguous()


class Sum:
    """A sum of tiles, shaped like a (B, N, H, D) tensor: gradients, in the accumulator's type. A first summand that
    covers everything is not copied until the next one.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._only: torch.Tensor | None = None
        self._begun = False

    def begin(self) -> None:
        """Make the memory of the sum, which a first summand otherwise spares."""
        like = self._like
        self._tensor = torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype), device=like.device)
        self._out = StridedView(self._tensor)
        self._begun = True
        if self._only is not None:
            self._tensor.copy_(as_shard(self._only))
            self._only = None

    @property
    def out(self) -> torch.Tensor:
        if not self._begun:
            self.begin()
        return self._tensor

    def place(self, rows: Rows, heads: Heads) -> torch.Tensor | None:
        """Return None: this sum has another type than its summands."""
        return None

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        if not self._begun:
            _, tokens, count, _ = self._like.shape
            if self._only is None and is_everything(rows, heads, tokens, count):
                self._only = tile
                return
            self.begin()
        self._out.add(rows, heads, tile)

    def materialize(self) -> None:
        """Copy a summand that was not copied yet: its buffer is about to change."""
        if self._only is not None:
            self.begin()

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum in `dtype`."""
        if self._only is None:
            return self.out.to(dtype)
        return as_shard(self._only).to(dtype, copy=True, memory_format=torch.contiguous_format)

    @staticmethod
    def results(sums: list[Sum], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return each sum in `dtype`."""
        return [x.result(dtype) for x in sums]


def as_shard(tile: torch.Tensor) -> torch.Tensor:
    """Return a tile (F, B, groups, per_group, L, D) that covers everything as (B, N, H, D): a view if possible."""
    folds, batch, groups, share, length, dim = tile.shape
    return tile.permute(1, 0, 4, 2, 3, 5).reshape(batch, folds * length, groups * share, dim)


def _lse_as_shard(lse: torch.Tensor) -> torch.Tensor:
    """Return (F, B, groups, per_group, L) as (B, H, N)."""
    folds, batch, groups, share, length = lse.shape
    return lse.permute(1, 2, 3, 0, 4).reshape(batch, groups * share, folds * length)


def lse_view(lse: torch.Tensor) -> StridedView:
    """Return a view of (B, H, N), a number for each query row, that is addressed as tiles with D = 1."""
    return StridedView(lse.transpose(1, 2).unsqueeze(-1))
