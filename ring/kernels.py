"""Partial attention of one tile, forward and backward, with lse. No kernel knows of ranks.

Tiles: q, out, dout (F, B, G, P, Lq, D): folds, batch, key/value heads, query heads of each, rows, head dim;
k, v (F, B, G, 1, Lk, D); lse, delta (F, B, G, P, Lq). Partial results come back in the accumulator's type, except
that the fused kernels round theirs to the inputs' type first.

The backward of a partial takes the *global* out and lse of its rows: dS = P (dO V^T - delta), P = exp(S - lse),
delta = rowsum(dO out) - dlse, and its dQ, dK, dV are summands of the whole (FlashAttention-2, arXiv 2307.08691,
algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ring.accumulator import accumulator_dtype
from ring.meetings import Mask
from ring.plan import Tile

KERNELS = ("auto", "math", "flash")
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tile, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Saved:
    """What the backward of a tile takes besides q, k, v: the tile's rows of dout, out, lse and delta."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def choose(kernel: str, device: torch.device, tile: Tile, dlse: bool) -> str:
    """The kernel that takes a tile: "flash" or "math".

    Torch's fused CPU kernel takes full and causal tiles on the CPU. Masks by position, a gradient through lse and other
    devices are the math kernel's, for "auto" and "flash" alike.
    """
    fused = kernel != "math" and device.type == "cpu" and tile.mask is not Mask.POSITION and not dlse
    return "flash" if fused else "math"


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


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    """scale * q k^T with -inf where the mask hides a key: (F, B, G, P, Lq, Lk). q, k in the accumulator's type."""
    folds, batch, groups, share, length, dim = q.shape
    rows = q.reshape(folds, batch, groups, share * length, dim)
    scores = (rows @ k.squeeze(3).mT).mul_(scale).view(folds, batch, groups, share, length, -1)
    if tile.mask is Mask.CAUSAL:
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    elif tile.mask is Mask.POSITION:
        assert tile.query_positions is not None and tile.key_positions is not None
        query, key = tile.query_positions.to(q.device), tile.key_positions.to(q.device)
        hidden = key[:, None, :] > query[:, :, None]  # (F, Lq, Lk)
        scores.masked_fill_(hidden[:, None, None, None], -torch.inf)
    return scores


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    work = accumulator_dtype(q.dtype)
    scores = _scores(q.to(work), k.to(work), tile, scale)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not exp(-inf + inf)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = weights.flatten(3, 4) @ v.squeeze(3).to(work)  # (F, B, G, P * Lq, D)
    out = out.view(*q.shape) / total.masked_fill(total == 0.0, 1.0)
    return out, (top + total.log()).squeeze(-1)


def _math_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    work = accumulator_dtype(q.dtype)
    q, k, v, dout = q.to(work), k.to(work), v.to(work), saved.dout.to(work)
    scores = _scores(q, k, tile, scale)
    lse = saved.lse.masked_fill(saved.lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = scores.sub_(lse).exp_().flatten(3, 4)  # (F, B, G, P * Lq, Lk)
    rows, douts = q.flatten(3, 4), dout.flatten(3, 4)  # (F, B, G, P * Lq, D)
    dv = weights.mT @ douts
    dscores = (douts @ v.squeeze(3).mT).sub_(saved.delta.flatten(3, 4).unsqueeze(-1)).mul_(weights).mul_(scale)
    dq = dscores @ k.squeeze(3)
    dk = dscores.mT @ rows
    return dq.view(*q.shape), dk.unsqueeze(3), dv.unsqueeze(3)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(F, B, G, P, L, D) as the (batch, heads, length, head dim) of torch's kernels."""
    folds, batch, groups, share, length, dim = x.shape
    return x.reshape(folds * batch, groups * share, length, dim)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(q), _batched(k), _batched(v), 0.0, tile.mask is Mask.CAUSAL, scale=scale
    )
    work = accumulator_dtype(q.dtype)
    return out.to(work).view(q.shape), lse.view(q.shape[:-1])


def _flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: Saved, tile: Tile, scale: float
) -> Tensors3:
    lse = saved.lse.reshape(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3], q.shape[4])
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _batched(saved.dout), _batched(q), _batched(k), _batched(v), _batched(saved.out), lse.contiguous(),
        0.0, tile.mask is Mask.CAUSAL, scale=scale,
    )  # fmt: skip
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
