"""Calls of kernels: partial attention of a tile, forward and backward, with lse. Kernels know no ranks.

`ring.compute.kernels.math` defines the shapes of tiles and the arguments of a backward.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ring.compute import kernel_counts
from ring.compute.kernels.kernel import Kernel, SavedRows, Scores, Tensors3
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Tile

# Bytes of a backward on a GPU beyond its operands and results; a single group of heads may take more.
MAX_WORKSPACE = 2**30


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    """Return (out, lse), lse in the accumulator's type. A row that sees no key of the tile has out 0, lse -inf."""
    kernel_counts.count(kernel.name)
    return kernel.forward(q, k, v, tile, scoring)


def backward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores
) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    kernel_counts.count(kernel.name)
    return kernel.backward(q, k, v, saved, tile, scoring)


def portions(kernel: Kernel, tile: Tile, q: Tensor, value_dim: int) -> list[Tile]:
    """Split a tile by groups of heads, to bound the memory of its backward. q: the whole (B, N, H, D)."""
    query, key = tile.query_heads, tile.key_heads
    if kernel.workspace is None or query.ids is not None or key.ids is not None:
        return [tile]
    rows, keys = (x.folds * x.length for x in (tile.query_rows, tile.key_rows))
    head_bytes = kernel.workspace(rows, keys, q.shape[3], value_dim)
    most = max(1, MAX_WORKSPACE // (head_bytes * q.shape[0] * query.per_group))
    if most >= query.groups:
        return [tile]
    return [_portion(tile, first, min(most, query.groups - first)) for first in range(0, query.groups, most)]


def _portion(tile: Tile, first: int, count: int) -> Tile:
    def rows(x: Rows) -> Rows:
        skip = first * x.head_step
        return replace(x, start=x.start + skip, index=None if x.index is None else x.index + skip)

    def heads(x: Heads) -> Heads:
        return x._replace(groups=count, start=x.start + first * x.step)

    return replace(
        tile,
        query_rows=rows(tile.query_rows),
        key_rows=rows(tile.key_rows),
        query_heads=heads(tile.query_heads),
        key_heads=heads(tile.key_heads),
    )
