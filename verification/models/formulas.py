"""Attention and rotary positions of whole sequences, by definition. Nothing here uses code of `ring/`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference.oracle import attention, gradients
from reference.pattern import Pattern


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: Pattern, settings: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.pattern, ctx.settings = pattern, settings
        return attention(q, k, v, pattern, sinks=sinks, **settings)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        dq, dk, dv, *dsinks = gradients(q, k, v, ctx.pattern, dout, dlse, sinks=sinks, **ctx.settings)
        return dq, dk, dv, dsinks[0] if dsinks else None, None, None


def oracle_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, sinks: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Attend over whole sequences by `reference.oracle`, both directions: q (S, n, H, D), k and v (S, n, Hk, D) ->
    out (S, n, H, D) and lse (S, H, n), all fp64. settings: other arguments of `reference.attention`."""
    out, lse = _Oracle.apply(q, k, v, sinks, pattern, settings)
    return out, lse


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary positions (n,) or (S, n) to x (S, n, H, D). Entries i and i + D / 2 of a head form a complex number,
    which position p rotates by p * theta ** (-2 i / D) (arXiv 2104.09864, in the order of Llama's published code)."""
    half = x.shape[3] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[..., None] * frequencies  # (..., n, D / 2)
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
    return torch.cat((turned.real, turned.imag), 3).to(x.dtype)
