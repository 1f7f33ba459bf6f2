"""The log-sum-exp merge: partial results of any kind into one accumulator per query row."""

from __future__ import annotations

from typing import Protocol

import torch

from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.precision import accumulator_dtype
from ring.strided_view import StridedView


def merge(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two softmax averages over disjoint multisets of keys as one. out: (..., D), lse: (...); returns the same.

    A side without keys has lse -inf and counts for nothing; two such sides give out 0 and lse -inf. The weights are
    exponentials of differences from the larger side, so no finite score overflows, and they are divided by their sum,
    so that a chain of merges stays an average. NaN and +inf go through as arithmetic has it.
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
        """(out, lse): (B, N, H, D) in that type, and (B, H, N)."""
        ...


class Accumulator:
    """Output (B, N, H, D) and lse (B, H, N) of the own query rows, starting from "nothing seen": 0 and -inf."""

    def __init__(self, query: torch.Tensor) -> None:
        batch, tokens, heads, dim = query.shape
        dtype = accumulator_dtype(query.dtype)
        self.out = torch.zeros(batch, tokens, heads, dim, dtype=dtype, device=query.device)
        self.lse = torch.full((batch, heads, tokens), -torch.inf, dtype=dtype, device=query.device)
        self._out, self._lse = StridedView(self.out), lse_view(self.lse)

    def merge(self, rows: Rows, heads: Heads, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a partial result. out: (F, B, groups, per_group, L, D); lse the same without D."""
        old_lse = self._lse.view(rows, heads).squeeze(-1)
        merged, merged_lse = merge(self._out.view(rows, heads), old_lse, out, lse)
        self._out.put(rows, heads, merged)
        self._lse.put(rows, heads, merged_lse.unsqueeze(-1))

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), out in that type."""
        return self.out.to(dtype), self.lse


class Sum:
    """A sum of tiles, shaped like a (B, N, H, D) tensor: gradients, in the accumulator's type."""

    def __init__(self, like: torch.Tensor) -> None:
        self.out = torch.zeros(like.shape, dtype=accumulator_dtype(like.dtype), device=like.device)
        self._out = StridedView(self.out)

    def add(self, rows: Rows, heads: Heads, tile: torch.Tensor) -> None:
        """Add a summand, (F, B, groups, per_group, L, D)."""
        self._out.add(rows, heads, tile)

    def settle(self) -> None:
        """A tile is read within `add`."""

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum in that type."""
        return self.out.to(dtype)


def lse_view(lse: torch.Tensor) -> StridedView:
    """A (B, H, N) tensor of one number per query row, addressed as tiles with D = 1."""
    return StridedView(lse.transpose(1, 2).unsqueeze(-1))
