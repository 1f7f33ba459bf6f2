"""Torch's fused kernels for one tile, full or causal: FlashAttention on the CPU; FlashAttention-2 and cuDNN on GPUs.

Tiles are shaped as in `ring.compute.math_kernel`. On the CPU everything is computed in the accumulator's type. On GPUs
the kernels work on 16-bit operands, accumulate in fp32, and round what they return to the inputs' type, except lse.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ring.compute import kernel_counts, math_kernel
from ring.compute.math_kernel import SavedRows, Tensors3
from ring.plan.tile import Mask, Tile
from ring.precision import accumulator_dtype


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the tile by kernel "flash" or, on GPUs, "cudnn"; lse in the accumulator's type."""
    return _cpu_forward(q, k, v, tile, scale) if q.device.type == "cpu" else _gpu_forward(name, q, k, v, tile, scale)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float
) -> Tensors3:
    """The tile's summands of dq, dk, dv, shaped like q, k, v."""
    if q.device.type == "cpu":
        return _cpu_backward(q, k, v, saved, tile, scale)
    return _gpu_backward(name, q, k, v, saved, tile, scale)


def _batched(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """(F, B, G, P, L, D) as the (batch, heads, length, head dim) of torch's kernels, in that type.

    Any strides but the head dim's: the fused CPU kernel of torch 2.11 takes it to be 1 without looking (2.13 looks).
    """
    if dtype is not None and x.dtype != dtype:
        x = x.to(dtype)
    folds, batch, groups, share, length, dim = x.shape
    x = x.reshape(folds * batch, groups * share, length, dim)
    return x if x.stride(3) == 1 or dim == 1 else x.contiguous()


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # In the accumulator's type: on 16-bit operands this kernel rounds probabilities, and sums gradients, in 16 bits.
    work = accumulator_dtype(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(q, work), _batched(k, work), _batched(v, work), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    if not lse.all():  # of a row whose scores are all -inf it says lse 0, as of one with a single score of 0
        kernel_counts.count("math")
        return math_kernel.forward(q, k, v, tile, scale)
    return out.view(q.shape), lse.view(q.shape[:-1])


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


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A tile for kernels that load 16 bytes at a time, as (batch, heads, length, head dim): a view, or a copy if its
    rows do not begin at such addresses. Not what `contiguous` gives: of a contiguous tensor that begins elsewhere it
    makes no copy.
    """
    found = _kernel_view(x.shape, x.stride(), x.element_size())
    if found is None or x.data_ptr() % 16:
        folds, batch, groups, share, length, dim = x.shape
        return x.clone(memory_format=torch.contiguous_format).view(folds * batch, groups * share, length, dim)
    return x.as_strided(*found)


@lru_cache(maxsize=8192)
def _kernel_view(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape and strides of a tile (F, B, G, P, L, D) as (batch, heads, length, head dim); None if these cannot be,
    or if rows do not lie a multiple of 16 bytes apart. size: bytes of a number.

    Where there is only one batch, head or row, any stride is as good; but cuDNN takes that of one row, or one head, at
    its word, and was seen to leave results out. So these are what they would be in a contiguous tensor.
    """
    folds, batch, groups, share, length, dim = shape
    outer = _as_one(folds, strides[0], batch, strides[1])
    heads = _as_one(groups, strides[2], share, strides[3])
    if outer is None or heads is None or (strides[5] != 1 and dim != 1):
        return None
    sizes, steps = (folds * batch, groups * share, length, dim), [outer, heads, strides[4], 1]
    if any(steps[i] * size % 16 for i in range(3) if sizes[i] > 1):
        return None
    whole = 1
    for i in (3, 2, 1, 0):
        if sizes[i] == 1:
            steps[i] = whole
        whole = max(whole, steps[i] * sizes[i])
    return sizes, tuple(steps)


def _as_one(outer: int, outer_step: int, inner: int, inner_step: int) -> int | None:
    """The stride of two dims as one; None if there is none."""
    if inner == 1:
        return outer_step
    return inner_step if outer == 1 or outer_step == inner * inner_step else None


@lru_cache
def _no_dropout(device: torch.device) -> torch.Tensor:
    """The seed, and offset, of random numbers that are not drawn."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _gpu_forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (_aligned(x) for x in (q, k, v))
    causal = tile.mask is Mask.CAUSAL
    if name == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
    lse = lse.reshape(query.shape[0], query.shape[1], -1)[
        ..., : query.shape[2]
    ]  # it may have a padded, or a fourth, dimension
    return out.view(q.shape), lse.view(q.shape[:-1])


def _alike(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same with one layout for all. Torch (2.11) keeps a cuDNN backward by the strides of q, k and v, and runs it
    with the strides that out and dout had when it was made: with others it reads the wrong rows.
    """
    found = [_aligned(x) for x in tensors]
    return found if len({x.stride() for x in found}) == 1 else [x.contiguous() for x in found]


def _gpu_backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: SavedRows, tile: Tile, scale: float
) -> Tensors3:
    query, out, dout = _alike(q, saved.out, saved.dout)
    key, value = _aligned(k), _aligned(v)
    lse = saved.lse.reshape(query.shape[:3]).contiguous()
    if lse.data_ptr() % 16:  # a stretch of a contiguous tensor may be contiguous, and begin anywhere
        lse = lse.clone()
    none, causal = _no_dropout(q.device), tile.mask is Mask.CAUSAL
    rows, keys = query.shape[2], key.shape[2]
    if name == "cudnn":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, query, key, value, out, lse.unsqueeze(-1), none, none, None, None, None, rows, keys, 0.0, causal,
            scale=scale,
        )  # fmt: skip
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, query, key, value, out, lse, None, None, rows, keys, 0.0, causal, none, none, scale=scale
        )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
