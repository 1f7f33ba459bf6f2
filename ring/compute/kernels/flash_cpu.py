"""Torch's FlashAttention on the CPU, full or causal, in the accumulator's type."""

from __future__ import annotations

import torch
from torch import Tensor

from ring.compute import kernel_counts
from ring.compute.kernels import math
from ring.compute.kernels.kernel import Kernel, SavedRows, Scores, Tensors3
from ring.plan.tile import Mask, Tile
from ring.precision import accumulator_dtype


def _batched(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (F, B, G, P, L, D) as (batch, heads, length, head dim), in `dtype`. Only the head dim's stride matters:
    the kernel, called directly, assumes 1 without a check.
    """
    folds, batch, groups, share, length, dim = x.shape
    x = x.to(dtype).reshape(folds * batch, groups * share, length, dim)
    return x if x.stride(3) == 1 or dim == 1 else x.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scoring: Scores) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the tile, lse in the accumulator's type."""
    # In the accumulator's type: on 16-bit operands this kernel rounds probabilities, and sums gradients, in 16 bits.
    work = accumulator_dtype(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(q, work), _batched(k, work), _batched(v, work), 0.0, tile.mask is Mask.CAUSAL, scale=scoring.scale
    )
    out, lse = out.view(q.shape), lse.view(q.shape[:-1])
    ambiguous = lse == 0  # of a row whose scores are all -inf, or of one with a single score of 0
    if ambiguous.any():
        kernel_counts.count(math.MATH.name)
        math_out, math_lse = math.forward(q, k, v, tile, scoring)
        # Replace these rows only: a row's bits must not depend on the scores of other rows.
        out[ambiguous], lse[ambiguous] = math_out[ambiguous], math_lse[ambiguous]
    return out, lse


def backward(q: Tensor, k: Tensor, v: Tensor, saved: SavedRows, tile: Tile, scoring: Scores) -> Tensors3:
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v."""
    work = accumulator_dtype(q.dtype)
    lse = saved.lse.reshape(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3], q.shape[4])
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # all scores of such a row are -inf: exp(-inf - 0) is 0
    query, key, value = _batched(q, work), _batched(k, work), _batched(v, work)
    dout, out = _batched(saved.dout, work), _batched(saved.out, work)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=scoring.scale
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


# Below 16 keys, the fp32 numbers in the widest vector of a CPU, it returns finite numbers for a row of NaN scores.
FLASH_CPU = Kernel(
    name="flash", device="cpu", forward=forward, backward=backward,
    takes_dims=lambda capability, dim, value_dim, share: dim == value_dim, limits="one head dim of keys and values",
    dtypes=None, least_keys=16, batched=False,
)  # fmt: skip
