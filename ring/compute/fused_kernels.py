"""Torch's fused kernels for one tile, full or causal: FlashAttention on the CPU; FlashAttention-2 and cuDNN on GPUs.

Results are shaped as in `ring.compute.math_kernel`, and so are operands on the CPU; on GPUs operands are batched
(`ring.strided_view`). On the CPU everything is computed in the accumulator's type. On GPUs the kernels work on 16-bit
operands, accumulate in fp32, and round results to the inputs' type, except lse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ring.compute import kernel_counts, math_kernel
from ring.compute.gpu import fa4_kernel, varlen_kernel
from ring.compute.gpu.varlen_kernel import no_dropout
from ring.compute.math_kernel import Into, SavedRows, Tensors3
from ring.compute.scores import Scores
from ring.plan.tile import Mask, Tile
from ring.precision import accumulator_dtype
from ring.strided_view import tile_shape


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scoring: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of the tile by kernel "flash" or, on GPUs, "cudnn" or "fa4"; lse in the accumulator's type."""
    if name == "fa4":
        return fa4_kernel.forward(q, k, v, tile, scoring)
    if q.device.type == "cpu":
        return _cpu_forward(q, k, v, tile, scoring)
    if tile.sequences is not None or tile.needs_window:
        return varlen_kernel.forward(q, k, v, tile, scoring.scale)
    return _gpu_forward(name, q, k, v, tile, scoring.scale)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scoring: Scores,
    into: Into | None = None,
) -> Tensors3:  # fmt: skip
    """Return the tile's summands of dq, dk, dv, shaped like q, k, v. into: memory for them, for "fa4" alone."""
    if name == "fa4":
        return fa4_kernel.backward(q, k, v, saved, tile, scoring, into or (None, None, None))
    assert into is None
    if q.device.type == "cpu":
        return _cpu_backward(q, k, v, saved, tile, scoring.scale)
    if tile.sequences is not None or tile.needs_window:
        return varlen_kernel.backward(q, k, v, saved, tile, scoring.scale)
    return _gpu_backward(name, q, k, v, saved, tile, scoring.scale)


def _batched(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return (F, B, G, P, L, D) as the (batch, heads, length, head dim) of torch's kernels, in `dtype`.

    Only the head dim's stride matters: torch's fused CPU kernel, called directly, assumes 1 without a check.
    """
    if dtype is not None and x.dtype != dtype:
        x = x.to(dtype)
    folds, batch, groups, share, length, dim = x.shape
    x = x.reshape(folds * batch, groups * share, length, dim)
    return x if x.stride(3) == 1 or dim == 1 else x.contiguous()


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scoring: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    # In the accumulator's type: on 16-bit operands this kernel rounds probabilities, and sums gradients, in 16 bits.
    work = accumulator_dtype(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(q, work), _batched(k, work), _batched(v, work), 0.0, tile.mask is Mask.CAUSAL, scale=scoring.scale
    )
    out, lse = out.view(q.shape), lse.view(q.shape[:-1])
    ambiguous = lse == 0  # of a row whose scores are all -inf, or of one with a single score of 0
    if ambiguous.any():
        kernel_counts.count("math")
        math_out, math_lse = math_kernel.forward(q, k, v, tile, scoring)
        # Replace these rows only: a row's bits must not depend on the scores of other rows.
        out[ambiguous], lse[ambiguous] = math_out[ambiguous], math_lse[ambiguous]
    return out, lse


def _cpu_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float
) -> Tensors3:
    work = accumulator_dtype(q.dtype)
    lse = saved.lse.reshape(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3], q.shape[4])
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # all scores of such a row are -inf: exp(-inf - 0) is 0
    query, key, value = _batched(q, work), _batched(k, work), _batched(v, work)
    dout, out = _batched(saved.dout, work), _batched(saved.out, work)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _gpu_forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    causal = tile.mask is Mask.CAUSAL
    if name == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    if lse.numel() > q.shape[0] * q.shape[1] * q.shape[2]:  # rows may be padded
        lse = lse.reshape(q.shape[0], q.shape[1], -1)[..., : q.shape[2]]
    shape = tile_shape(tile.query_rows, tile.query_heads, out)
    return out.view(shape), lse.view(shape[:-1])


def _same_strides(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors with equal strides. Torch (2.11) caches a cuDNN backward by the strides of q, k and v, but
    with the strides that out and dout had at its creation: with others it reads the wrong rows.
    """
    return tensors if len({x.stride() for x in tensors}) == 1 else [x.contiguous() for x in tensors]


def _gpu_backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float
) -> Tensors3:
    query, out, dout = _same_strides(q, saved.out, saved.dout)
    lse = saved.lse.contiguous()  # (FB, H, L, 1)
    if lse.data_ptr() % 16:  # a contiguous slice may begin at any address
        lse = lse.clone()
    none, causal = no_dropout(q.device), tile.mask is Mask.CAUSAL
    rows, keys = query.shape[2], k.shape[2]
    if name == "cudnn":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, query, k, v, out, lse, none, none, None, None, None, rows, keys, 0.0, causal, scale=scale
        )
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, query, k, v, out, lse.squeeze(3), None, None, rows, keys, 0.0, causal, none, none, scale=scale
        )
    dk, dv = (x.view(tile_shape(tile.key_rows, tile.key_heads, x)) for x in (dk, dv))
    return dq.view(tile_shape(tile.query_rows, tile.query_heads, q)), dk, dv
