"""Torch's FlashAttention-2 on GPUs for tiles with several sequences or a window, by the function that takes both.

It takes (batch, tokens, heads, head dim), or for several sequences (tokens, heads, head dim) with the batch flattened
into the tokens: each row of the batch has the same sequences. Operands are batched (`ring.strided_view`), results are
shaped as in `ring.compute.math_kernel`.
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
    """Return (out, lse) of a tile with sequences or a window; lse in fp32."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *operands(tile, q, k, v), *_lengths(tile, q), 0.0, tile.mask is Mask.CAUSAL, False, scale=scale, **window(tile)
    )
    return heads_first_results(out, lse, tile, q)


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    none, dout = no_dropout(q.device), saved.dout
    grads = torch.ops.aten._flash_attention_backward(
        *operands(tile, dout, q, k, v, saved.out), by_row(tile, saved.lse), *_lengths(tile, q), 0.0,
        tile.mask is Mask.CAUSAL, none, none, scale=scale, **window(tile),
    )  # fmt: skip
    key_shape = tile_shape(tile.key_rows, tile.key_heads, k)
    dq, dk, dv = (heads_first(x, tile, q.shape[0]) for x in grads)
    return dq.view(tile_shape(tile.query_rows, tile.query_heads, q)), dk.view(key_shape), dv.view(key_shape)


def _lengths(tile: Tile, q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    if tile.sequences is None:
        return None, None, tile.query_rows.length, tile.key_rows.length
    edges = edges_of(tile, q)
    return edges.query, edges.key, *edges.longest


def window(tile: Tile) -> dict[str, int]:
    """Return the arguments of a kernel for the tile's window: none without one."""
    if not tile.needs_window:
        return {}
    reach = tile.key_rows.length if tile.window is None else tile.window
    before, after = tile.mask is not Mask.ANTICAUSAL, tile.mask is not Mask.CAUSAL
    return {"window_size_left": reach * before, "window_size_right": reach * after}


def operands(tile: Tile, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return (B, H, L, D) as (B, L, H, D), or for several sequences as (B L, H, D): a view if the rows of the batch
    follow each other.
    """
    rows_first = [x.transpose(1, 2) for x in tensors]
    return rows_first if tile.sequences is None else [x.flatten(0, 1) for x in rows_first]


def heads_first(x: torch.Tensor, tile: Tile, batch: int) -> torch.Tensor:
    """Return a kernel's result as (B, H, L, D)."""
    return (x if tile.sequences is None else x.view(batch, -1, *x.shape[1:])).transpose(1, 2)


def heads_first_results(
    out: torch.Tensor, lse: torch.Tensor, tile: Tile, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a kernel's (out, lse), shaped as in `ring.compute.math_kernel`. q: (B, H, L, D)."""
    batch, heads, rows, _ = q.shape
    shape = tile_shape(tile.query_rows, tile.query_heads, q)[:-1]
    if tile.sequences is not None:
        lse = lse.view(heads, batch, rows).transpose(0, 1)
    return heads_first(out, tile, batch).view(*shape, out.shape[-1]), lse.view(shape)


def by_row(tile: Tile, x: torch.Tensor) -> torch.Tensor:
    """Return a number for each row, (B, H, L, 1), as (B, H, L), or for several sequences as (H, B L)."""
    numbers = x.squeeze(3)
    if tile.sequences is not None:
        numbers = numbers.transpose(0, 1).reshape(numbers.shape[1], -1)
    return numbers.contiguous()


def edges_of(tile: Tile, q: torch.Tensor) -> _CuSeqlens:
    assert tile.sequences is not None
    edges = _cu_seqlens(tile.sequences, q.shape[0], q.device)
    keep_alive_in_graph(edges.query, edges.key)
    return edges
