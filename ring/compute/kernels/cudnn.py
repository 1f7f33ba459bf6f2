"""Torch's cuDNN attention on GPUs, full or causal, for tiles of one length: it works on 16-bit operands, accumulates in
fp32, and rounds results to the inputs' type, except lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring.compute.kernels.flash import FLASH
from ring.compute.kernels.kernel import HOPPER, Kernel, SavedRows, Scores, Tensors3
from ring.compute.kernels.operands import aligned_saved, no_dropout, shape_gradients, unpadded_results, workspace
from ring.plan.tile import Mask, Tile


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the tile; lse in fp32."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, tile.mask is Mask.CAUSAL, False, scale=scoring.scale
    )
    return unpadded_results(out, lse, tile, q)


def backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    query, out, dout, lse = aligned_saved(q, saved)
    none, causal = no_dropout(q.device), tile.mask is Mask.CAUSAL
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, query, k, v, out, lse, none, none, None, None, None, query.shape[2], k.shape[2], 0.0, causal,
        scale=scoring.scale,
    )  # fmt: skip
    return shape_gradients(grads, tile)


def _takes_dims(capability: tuple[int, int], dim: int, value_dim: int, share: int) -> bool:
    wide = capability == HOPPER and (dim == value_dim <= 256 or (dim, value_dim) == (192, 128))
    return dim % 8 == value_dim % 8 == 0 and (max(dim, value_dim) <= 128 or wide)


# It would prepare anew for each list of lengths, and its backward refuses a single row and key.
CUDNN = Kernel(
    name="cudnn", device="cuda", forward=forward, backward=backward, takes_dims=_takes_dims,
    limits="dtype float16 or bfloat16 and head dims up to 128 that are multiples of 8; on GPUs of compute capability "
    "9.0 also up to 256, the same for keys and values, or 192 with values of 128",
    repeatable=False, repeated_by=FLASH, single=False, workspace=workspace, measured=True,
)  # fmt: skip
