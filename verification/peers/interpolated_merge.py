"""Error bounds for the merge of partial results by interpolation, on top of the bounds of a weighted merge.

There are two ways to merge (o, L) with a further partial result (o', L'). Weighted: o e^(L-M) + o' e^(L'-M), M the
merged lse; its rounding errors are relative to the contributions, which `reference.bounds` covers. Interpolated:

    o - s (o - o'),   s = sigmoid(L' - L)

(zhuzilin/ring-flash-attention#34, adopted by yunchang and torch). Errors of L and L' change s by at most s (1 - s)
times as much, and s |o'| and (1 - s) |o| are contributions, so the bounds cover these. But s is rounded by 4u (an
exponential 2u, a sum, a quotient), the difference by u and the product by u, each times |o - o'| <= 2 max|V|. The last
difference is rounded by u max|V|. The total is 13 u max|V|, however small the result. So if one block has nearly all
weight and small values, the contribution of the others is lost. This is allowed here, since every such package has it:

    A_O  = 13 u p max|V| (1 + u_out)          p partial results, max over the keys of the head
    A_D  = |dO| . A_O
    A_dQ = a A_D max|K|,   A_dK = a sum over rows of A_D |Q|        since no probability exceeds 1
    A_db = sum over batch and rows of A_D                           a sink is one more partial result
"""

from __future__ import annotations

import numpy as np

from reference.fast_oracle import Expectation
from reference.roundoff import Arithmetic


def widen_bounds(expectation: Expectation, r: Arithmetic) -> None:
    """Add this error to the bounds of out, dq, dk and dsinks."""
    if expectation.inputs.sinks is not None:
        r = r.with_sink()
    q, k, v, dout = (getattr(expectation.inputs, name) for name in ("q", "k", "v", "dout"))
    heads, kv_heads = q.shape[2], k.shape[2]
    largest_k, largest_v = (
        np.abs(x).max(1, keepdims=True).repeat(heads // kv_heads, 2) for x in (k, v)
    )  # (B, 1, H, D)
    live = ~expectation.dead_rows.T[None, :, :, None]  # (1, N, H, 1)
    out = 13 * r.u * r.counts.merges * (1 + r.u_out) * largest_v * live  # (B, N, H, D)
    delta = (np.abs(dout) * out).sum(-1, keepdims=True)  # (B, N, H, 1)
    dk = (delta * np.abs(q)).sum(1)  # (B, H, D)
    dk = dk.reshape(dk.shape[0], kv_heads, -1, dk.shape[-1]).sum(2)  # (B, Hk, D)
    visible = ~expectation.dead_keys.T[None, :, :, None]  # (1, N, Hk, 1)
    expectation.bound["out"] += out * r.sides
    expectation.bound["dq"] += r.scale * delta * largest_k * r.sides
    expectation.bound["dk"] += r.scale * dk[:, None] * visible * r.sides
    if expectation.inputs.sinks is not None:
        expectation.bound["dsinks"] += delta.sum((0, 1, 3)) * (expectation.inputs.sinks > -np.inf) * r.sides
