"""Torch's FlashAttention-2 on GPUs: it works on 16-bit operands, accumulates in fp32, and rounds results to the inputs'
type, except lse. Tiles with several sequences or a window go to the function that takes both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring.compute.kernels.kernel import Kernel, SavedRows, Scores, Tensors3
from ring.compute.kernels.operands import (
    aligned_saved,
    by_row,
    heads_first_gradients,
    heads_first_results,
    make_edges,
    no_dropout,
    rows_first,
    shape_gradients,
    unpadded_results,
    window,
    workspace,
)
from ring.plan.tile import Mask, Tile


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the tile; lse in fp32."""
    scale, causal = scoring.scale, tile.mask is Mask.CAUSAL
    if tile.sequences is not None or tile.needs_window:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *rows_first(tile, q, k, v), *_lengths(tile, q), 0.0, causal, False, scale=scale, **window(tile)
        )
        return heads_first_results(out, lse, tile, q)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return unpadded_results(out, lse, tile, q)


def backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    none, causal, scale = no_dropout(q.device), tile.mask is Mask.CAUSAL, scoring.scale
    if tile.sequences is not None or tile.needs_window:
        grads = torch.ops.aten._flash_attention_backward(
            *rows_first(tile, saved.dout, q, k, v, saved.out), by_row(tile, saved.lse), *_lengths(tile, q), 0.0,
            causal, none, none, scale=scale, **window(tile),
        )  # fmt: skip
        return heads_first_gradients(grads, tile, q)
    query, out, dout, lse = aligned_saved(q, saved)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, query, k, v, out, lse.squeeze(3), None, None, query.shape[2], k.shape[2], 0.0, causal, none, none,
        scale=scale,
    )  # fmt: skip
    return shape_gradients(grads, tile)


def _lengths(tile: Tile, q: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    if tile.sequences is None:
        return None, None, tile.query_rows.length, tile.key_rows.length
    return make_edges(tile.sequences, q)


# Longer documents keep a GPU busy for longer than the host needs for their call, and cuDNN takes less time for them
# than FlashAttention-2 for several lengths. Windows on an H200: FlashAttention-2 took 0.79 of cuDNN's time for parts
# without a window at 1023, and 1.07 of it at 2047.
FLASH = Kernel(
    name="flash", device="cuda", forward=forward, backward=backward,
    takes_dims=lambda capability, dim, value_dim, share: dim % 8 == 0 and dim == value_dim <= 256,
    limits="dtype float16 or bfloat16 and head dims up to 256 that are multiples of 8, the same for keys and values",
    max_varlen_tokens=2048, max_window=1536, workspace=workspace, measured=True, fixed_bits=True, alone=True,
)  # fmt: skip
