"""Attention by matrix products and autograd: a stand-in for the kernels of single-process peers, which need a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, Nq, H, D), k, v (B, Nk, H, D) -> out like q, lse (B, H, Nq), in fp32, for fp64 in fp64, under autocast too.

    Causal: query i sees keys 0 .. i. Every row sees a key; there may be no rows."""
    with torch.autocast(q.device.type, enabled=False):  # which a kernel does not look at
        return _attention(q, k, v, scale, causal)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    wide = [x if x.dtype == torch.float64 else x.float() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", wide[0], wide[1]) * scale
    if causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), -math.inf)
    if not scores.shape[-1]:  # then there are no queries either; torch has no maximum over nothing
        return q.clone(), scores.new_zeros(scores.shape[:-1])
    lse = scores.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (scores - lse.unsqueeze(-1)).exp(), wide[2]).to(q.dtype), lse
