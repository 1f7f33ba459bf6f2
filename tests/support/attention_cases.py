"""Patterns, layouts and inputs of one rank's calls of `ring_attention`, and the calls with their types told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reference.pattern import Branch, Pattern
from ring import Layout, ring_attention

PATTERNS = {
    "dense": Pattern.dense(),
    "causal": Pattern.dense(causal=True),
    "longnet": Pattern.longnet((4, 12), (1, 3), 4),
    "longnet causal": Pattern.longnet((4, 12), (1, 3), 4, causal=True),
    "head groups": Pattern.head_groups((4, 8, None), (1, 2, 4), 4, causal=True),
    "gaps": Pattern((Branch(7, 3, 2),), causal=True),  # most rows see nothing
    "per head": Pattern((Branch(8, 3, (2, 0, 1, 2)), Branch(None, 2, 1, range(1, 3)))),
    "twice": Pattern((Branch(6, 2, 1), Branch(6, 2, 1)), causal=True),
}
# For 17 tokens.
PACKED = Pattern.longnet((4, None), (1, 3), 4, causal=True, documents=(5, 0, 1, 7, 1, 3))
LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "contiguous": lambda n: Layout.contiguous(n, 1),
    "hilbert": lambda n: Layout.hilbert(n, 1),
    "reversed": lambda n: Layout.from_cuts(range(n)[::-1], (0, n)),
    "rotated": lambda n: Layout.from_cuts([*range(n // 2, n), *range(n // 2)], (0, n)),
}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    n: int = 17, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64, batch: int = 2, dim: int = 5
) -> list[torch.Tensor]:
    """q, k, v, dout, dlse"""
    q, dout = normal(batch, n, heads, dim, seed=1, dtype=dtype), normal(batch, n, heads, dim, seed=4, dtype=dtype)
    k, v = (normal(batch, n, kv_heads, dim, seed=seed, dtype=dtype) for seed in (2, 3))
    work = torch.float64 if dtype is torch.float64 else torch.float32
    return [q, k, v, dout, normal(batch, heads, n, seed=5, dtype=work)]


def call(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = ring_attention(*args, return_lse=True, **options)
    assert isinstance(found, tuple)
    return found


def plain(*args: Any, **options: Any) -> torch.Tensor:
    found = ring_attention(*args, **options)
    assert isinstance(found, torch.Tensor)
    return found
