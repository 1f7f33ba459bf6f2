"""Operands and results of the kernels of GPUs. Torch's kernels for one length take batched operands, (batch, heads,
rows, head dim): see `ring.strided_view`. Those of FlashAttention for several lengths or a window take rows before
heads, and for several sequences the batch flattened into the rows: each row of the batch has the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ring.caching.graph_keepalive import keep_alive_in_graph
from ring.caching.weak_cache import cached_on
from ring.compute.kernels.kernel import SavedRows, Tensors3
from ring.plan.ranges import Ints
from ring.plan.tile import Mask, Sequences, Tile
from ring.strided_view import tile_shape

Edges = tuple[Tensor, Tensor, int, int]


@cached_on
def _cu_seqlens(sequences: Sequences, batch: int, device: torch.device) -> Edges:
    """Return the cumulative lengths, copied to a GPU once, and the most tokens of a sequence."""
    query, key = (torch.from_numpy(over_batch(x, batch)).to(device) for x in (sequences.query, sequences.key))
    return query, key, *sequences.longest


def over_batch(edges: Ints, batch: int) -> np.ndarray:
    """Repeat the edges (S + 1,) of one row's sequences for a batch of concatenated rows: int32."""
    begins = edges[-1] * np.arange(batch)[:, None] + edges[:-1]
    return np.append(begins, batch * edges[-1]).astype(np.int32)


def make_edges(sequences: Sequences, q: Tensor) -> Edges:
    """Return the cumulative lengths of the batch, int32 (B S + 1,) on the GPU, of queries and of keys; the most tokens
    of a sequence, of both.
    """
    edges = _cu_seqlens(sequences, q.shape[0], q.device)
    keep_alive_in_graph(*edges[:2])
    return edges


@lru_cache
def no_dropout(device: torch.device) -> Tensor:
    """Return the seed, or offset, of dropout that is off."""
    return torch.zeros((), dtype=torch.int64, device=device)


def window(tile: Tile) -> dict[str, int]:
    """Return the arguments of a kernel for the tile's window: none without one."""
    if not tile.needs_window:
        return {}
    reach = tile.key_rows.length if tile.window is None else tile.window
    before, after = tile.mask is not Mask.ANTICAUSAL, tile.mask is not Mask.CAUSAL
    return {"window_size_left": reach * before, "window_size_right": reach * after}


def rows_first(tile: Tile, *tensors: Tensor) -> list[Tensor]:
    """Return (B, H, L, D) as (B, L, H, D), or for several sequences as (B L, H, D): a view if the rows of the batch
    follow each other.
    """
    transposed = [x.transpose(1, 2) for x in tensors]
    return transposed if tile.sequences is None else [x.flatten(0, 1) for x in transposed]


def by_row(tile: Tile, x: Tensor) -> Tensor:
    """Return a number for each row, (B, H, L, 1), as (B, H, L), or for several sequences as (H, B L)."""
    numbers = x.squeeze(3)
    if tile.sequences is not None:
        numbers = numbers.transpose(0, 1).reshape(numbers.shape[1], -1)
    return numbers.contiguous()


def _heads_first(x: Tensor, tile: Tile, batch: int) -> Tensor:
    """Return (B, L, H, D), or (B L, H, D), as (B, H, L, D)."""
    return (x if tile.sequences is None else x.view(batch, -1, *x.shape[1:])).transpose(1, 2)


def heads_first_results(out: Tensor, lse: Tensor, tile: Tile, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a kernel that takes rows before heads. q: (B, H, L, D)."""
    batch, heads, rows, _ = q.shape
    if tile.sequences is not None:
        lse = lse.view(heads, batch, rows).transpose(0, 1)
    return _shape_results(_heads_first(out, tile, batch), lse, tile)


def heads_first_gradients(grads: Sequence[Tensor], tile: Tile, q: Tensor) -> Tensors3:
    """Return dq, dk, dv of a kernel that takes rows before heads. q: (B, H, L, D)."""
    return shape_gradients([_heads_first(x, tile, q.shape[0]) for x in grads], tile)


def unpadded_results(out: Tensor, lse: Tensor, tile: Tile, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a kernel that takes batched operands."""
    if lse.numel() > q.shape[0] * q.shape[1] * q.shape[2]:  # rows may be padded
        lse = lse.reshape(q.shape[0], q.shape[1], -1)[..., : q.shape[2]]
    return _shape_results(out, lse, tile)


def _shape_results(out: Tensor, lse: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    shape = tile_shape(tile.query_rows, tile.query_heads, out)
    return out.view(shape), lse.view(shape[:-1])


def shape_gradients(grads: Sequence[Tensor], tile: Tile) -> Tensors3:
    """Return batched dq, dk, dv, shaped as tiles."""
    dq, *of_keys = grads
    dk, dv = (x.view(tile_shape(tile.key_rows, tile.key_heads, x)) for x in of_keys)
    return dq.view(tile_shape(tile.query_rows, tile.query_heads, dq)), dk, dv


def aligned_saved(q: Tensor, saved: SavedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, out, dout and lse (B, H, L, 1) for a backward of torch on batched operands."""
    query, out, dout = q, saved.out, saved.dout
    # Torch (2.11) caches a cuDNN backward by the strides of q, k and v, but with the strides that out and dout had at
    # its creation: with others it reads the wrong rows.
    if len({x.stride() for x in (query, out, dout)}) > 1:
        query, out, dout = query.contiguous(), out.contiguous(), dout.contiguous()
    lse = saved.lse.contiguous()
    return query, out, dout, lse.clone() if lse.data_ptr() % 16 else lse  # a contiguous slice may begin at any address


def workspace(rows: int, keys: int, dim: int, value_dim: int) -> int:
    """Bytes of a query head's backward beyond operands and results: dq in fp32, and dk and dv in 16 bits."""
    return 4 * rows * dim + 2 * keys * (dim + value_dim)
