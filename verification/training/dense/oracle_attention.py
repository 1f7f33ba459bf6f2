"""The oracle's attention as an autograd function; both directions are computed by `reference.oracle`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference.oracle import attention, gradients
from reference.pattern import Pattern


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.pattern, ctx.scale = pattern, scale
        return attention(q, k, v, pattern, scale=scale)[0]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        return (*gradients(q, k, v, ctx.pattern, incoming[0], scale=ctx.scale), None, None)


def oracle_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None = None) -> Tensor:
    """Attend over whole sequences: q (S, n, H, D), k and v (S, n, Hk, D) -> (S, n, H, D), all fp64."""
    out: Tensor = _Oracle.apply(q, k, v, pattern, scale)
    return out
