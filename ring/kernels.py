"""Partial attention of one tile, forward and backward, with lse. No kernel knows of ranks.

Tiles: q, out, dout (F, B, G, P, Lq, D): folds, batch, key/value heads, query heads of each, rows, head dim;
k, v (F, B, G, 1, Lk, D); lse, delta (F, B, G, P, Lq). Whatever the inputs' type, everything is computed in the
accumulator's, and partial results come back in it.

The backward of a partial takes the *global* out and lse of its rows: dS = P (dO V^T - delta), P = exp(S - lse),
delta = rowsum(dO out) - dlse, and its dQ, dK, dV are summands of the whole (FlashAttention-2, arXiv 2307.08691,
algorithm 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ring.accumulator import accumulator_dtype
from ring.meetings import Mask
from ring.plan import Tile

KERNELS = ("auto", "math", "flash")
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Numbers in the widest vector of a CPU, 512 bits of fp32.
VECTOR = 16
# The math kernel takes at least so many query rows at a time.
_LEAST_ROWS = 8


@dataclass(frozen=True)
class Saved:
    """What the backward of a tile takes besides q, k, v: the tile's rows of dout, out, lse and delta."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def choose(kernel: str, device: torch.device, tile: Tile, scale: float, dlse: bool) -> str:
    """The kernel that takes a tile: "flash" or "math".

    Torch's fused CPU kernel takes full and causal tiles on the CPU, if the scale is positive (it multiplies masked
    scores, which are -inf, by it) and there are keys enough to fill a vector (with fewer, it returns finite numbers for
    a row whose scores are all NaN). What it does not take, a mask by position and a gradient through lse among them, is
    the math kernel's, for "auto" and "flash" alike.
    """
    if kernel == "math" or device.type != "cpu" or dlse or scale <= 0:
        return "math"
    return "flash" if tile.mask is not Mask.POSITION and tile.key_rows.length >= VECTOR else "math"


def forward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the tile, in the accumulator's type. A row that sees no key of the tile: out 0, lse -inf."""
    return _flash_forward(q, k, v, tile, scale) if name == "flash" else _math_forward(q, k, v, tile, scale)


def backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    """The tile's summands of dq, dk, dv, shaped like q, k, v."""
    if name == "flash":
        return _flash_backward(q, k, v, saved, tile, scale)
    return _math_backward(q, k, v, saved, tile, scale)


def _row_blocks(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    """Query rows in blocks whose scores are no larger than q itself: the workspace is O(n / p), whatever the bucket."""
    length, keys = q.shape[-2], k.shape[-2]
    step = max(_LEAST_ROWS, length * q.shape[-1] // keys)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float, rows: slice) -> torch.Tensor:
    """scale * q k^T, -inf where hidden: (F, B, G, P * L, Lk). q (F, B, G, P, L, D), k (F, B, G, Lk, D)."""
    scores = (q.flatten(3, 4) @ k.mT).mul_(scale)
    if tile.mask is Mask.FULL:
        return scores
    if tile.mask is Mask.CAUSAL:
        keys = torch.arange(k.shape[-2], device=q.device)
        hidden = (keys > keys[rows, None]).unsqueeze(0)  # (1, L, Lk)
    else:
        assert tile.query_positions is not None and tile.key_positions is not None
        query, key = tile.query_positions[:, rows].to(q.device), tile.key_positions.to(q.device)
        hidden = key[:, None, :] > query[:, :, None]  # (F, L, Lk)
    scores.unflatten(3, q.shape[3:5]).masked_fill_(hidden[:, None, None, None], -torch.inf)
    return scores


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    work = accumulator_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=work, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=work, device=q.device)
    k, v = k.squeeze(3).to(work), v.squeeze(3).to(work)  # (F, B, G, Lk, D)
    for rows in _row_blocks(q, k):
        scores = _scores(q[..., rows, :].to(work), k, tile, scale, rows)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) is 0
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        found = (weights @ v).div_(total.masked_fill(total == 0.0, 1.0))
        out[..., rows, :] = found.view(out[..., rows, :].shape)
        lse[..., rows] = (top + total.log()).view(lse[..., rows].shape)
    return out, lse


def _math_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    work = accumulator_dtype(q.dtype)
    k, v = k.squeeze(3).to(work), v.squeeze(3).to(work)  # (F, B, G, Lk, D)
    dq = torch.empty(q.shape, dtype=work, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    safe_lse = saved.lse.masked_fill(saved.lse == -torch.inf, 0.0)
    for rows in _row_blocks(q, k):
        query, dout = q[..., rows, :].to(work), saved.dout[..., rows, :].to(work).flatten(3, 4)  # (F, B, G, P * L, D)
        lse, delta = safe_lse[..., rows].flatten(3, 4), saved.delta[..., rows].flatten(3, 4)  # (F, B, G, P * L)
        weights = _scores(query, k, tile, scale, rows).sub_(lse.unsqueeze(-1)).exp_()  # (F, B, G, P * L, Lk)
        dv += weights.mT @ dout
        dscores = (dout @ v.mT).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(scale)
        dq[..., rows, :] = (dscores @ k).view(query.shape)
        dk += dscores.mT @ query.flatten(3, 4)
    return dq, dk.unsqueeze(3), dv.unsqueeze(3)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(F, B, G, P, L, D) as the (batch, heads, length, head dim) of torch's kernels.

    Any strides but the head dim's: the fused CPU kernel of torch 2.11 takes it to be 1 without looking (2.13 looks).
    """
    folds, batch, groups, share, length, dim = x.shape
    x = x.reshape(folds * batch, groups * share, length, dim)
    return x if x.stride(3) == 1 or dim == 1 else x.contiguous()


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # In the accumulator's type: on 16-bit operands this kernel rounds probabilities, and sums gradients, in 16 bits.
    work = accumulator_dtype(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_batched(x.to(work)) for x in (q, k, v)), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    return out.view(q.shape), lse.view(q.shape[:-1])


def _flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    work = accumulator_dtype(q.dtype)
    lse = saved.lse.reshape(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3], q.shape[4])
    dout, query, key, value, out = (_batched(x.to(work)) for x in (saved.dout, q, k, v, saved.out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, query, key, value, out, lse.contiguous(), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
