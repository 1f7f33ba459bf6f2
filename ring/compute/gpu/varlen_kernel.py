"""Torch's variable-length FlashAttention-2 on GPUs: all sequences of a tile in one call.

It takes (tokens, heads, head dim) with the batch flattened into the tokens: each row of the batch has the same
sequences. Operands are batched (`ring.strided_view`), results are shaped as in `ring.compute.math_kernel`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ring.caching.graph_keepalive import keep_alive_in_graph
from ring.caching.weak_cache import cached_on
from ring.compute.math_kernel import SavedRows, Tensors3
from ring.plan.ranges import Ints
from ring.plan.tile import Mask, Sequences, Tile
from ring.strided_view import tile_shape


class _CuSeqlens(NamedTuple):
    """Cumulative sequence lengths of the batch, int32 (B S + 1,) on the GPU, and the most tokens of a sequence."""

    query: torch.Tensor
    key: torch.Tensor
    longest: tuple[int, int]


@cached_on
def _cu_seqlens(sequences: Sequences, batch: int, device: torch.device) -> _CuSeqlens:
    """Return the cumulative lengths, copied to a GPU once."""
    query, key = (torch.from_numpy(over_batch(x, batch)).to(device) for x in (sequences.query, sequences.key))
    return _CuSeqlens(query, key, sequences.longest)


def over_batch(edges: Ints, batch: int) -> np.ndarray:
    """Repeat the edges (S + 1,) of one row's sequences for a batch of concatenated rows: int32."""
    begins = edges[-1] * np.arange(batch)[:, None] + edges[:-1]
    return np.append(begins, batch * edges[-1]).astype(np.int32)


@lru_cache
def no_dropout(device: torch.device) -> torch.Tensor:
    """Return the seed, or offset, of dropout that is off."""
    return torch.zeros((), dtype=torch.int64, device=device)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a tile with sequences; lse in fp32."""
    edges = edges_of(tile, q)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        by_token(q), by_token(k), by_token(v), edges.query, edges.key, *edges.longest, 0.0,
        tile.mask is Mask.CAUSAL, False, scale=scale,
    )  # fmt: skip
    batch, heads, rows, _ = q.shape
    shape = tile_shape(tile.query_rows, tile.query_heads, q)
    out, lse = by_head(out, batch), lse.view(heads, batch, rows).transpose(0, 1)
    return out.view(shape), lse.view(shape[:-1])


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    edges, none, batch = edges_of(tile, q), no_dropout(q.device), q.shape[0]
    lse = saved.lse.squeeze(3).transpose(0, 1).reshape(q.shape[1], -1)  # (H, B L)
    grads = torch.ops.aten._flash_attention_backward(
        by_token(saved.dout), by_token(q), by_token(k), by_token(v), by_token(saved.out), lse.contiguous(),
        edges.query, edges.key, *edges.longest, 0.0, tile.mask is Mask.CAUSAL, none, none, scale=scale,
    )  # fmt: skip
    key_shape = tile_shape(tile.key_rows, tile.key_heads, k)
    dq, dk, dv = (by_head(x, batch) for x in grads)
    return dq.view(tile_shape(tile.query_rows, tile.query_heads, q)), dk.view(key_shape), dv.view(key_shape)


def edges_of(tile: Tile, q: torch.Tensor) -> _CuSeqlens:
    assert tile.sequences is not None
    edges = _cu_seqlens(tile.sequences, q.shape[0], q.device)
    keep_alive_in_graph(edges.query, edges.key)
    return edges


def by_token(x: torch.Tensor) -> torch.Tensor:
    """Return (B, H, L, D) as (B L, H, D): a view if the rows of the batch follow each other."""
    return x.transpose(1, 2).flatten(0, 1)


def by_head(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Return (B L, H, D) as a view (B, H, L, D)."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)
