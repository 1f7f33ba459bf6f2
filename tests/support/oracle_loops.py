"""Attention by loops over batch, head, query, branch and key, written from the definition; autograd differentiates."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference import Branch, Pattern, attention, gradients
from reference.slices import Slice

# fp64, at most some dozens of terms of size ~1: rounding stays a thousand times below this.
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


class Example(NamedTuple):
    q: Tensor  # (B, Nq, Hq, D)
    k: Tensor  # (B, Nk, Hk, D)
    v: Tensor  # (B, Nk, Hk, Dv)
    dout: Tensor  # (B, Nq, Hq, Dv)
    dlse: Tensor  # (B, Hq, Nq)
    at: dict[str, Any]  # positions, where they are given
    sinks: Tensor | None = None  # (Hq,)
    softcap: float | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


Tokens = int | list[int]  # how many, or their positions


def example(
    queries: Tokens, keys: Tokens, heads: int = 2, kv_heads: int = 2, batch: int = 1, dim: int = 3, value_dim: int = 3
) -> Example:
    """Seeded normal values."""
    generator = torch.Generator().manual_seed(7)
    given = {"q_positions": queries, "k_positions": keys}
    at = {name: torch.tensor(p, dtype=torch.int64) for name, p in given.items() if isinstance(p, list)}
    n_q, n_k = (p if isinstance(p, int) else len(p) for p in (queries, keys))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k, v = normal(batch, n_k, kv_heads, dim), normal(batch, n_k, kv_heads, value_dim)
    q, dout = normal(batch, n_q, heads, dim), normal(batch, n_q, heads, value_dim)
    return Example(q, k, v, dout, normal(batch, heads, n_q), at)


def in_slice(one: Slice, i: int, j: int) -> bool:
    q0, q1, k0, k1, low, high = one
    within = i >= q0 and (q1 is None or i < q1) and j >= k0 and (k1 is None or j < k1)
    return within and (low is None or j - i >= low) and (high is None or j - i <= high)


def sees(pattern: Pattern, branch: Branch, h: int, i: int, j: int, heads: int) -> bool:
    """M_b[h, i, j] from its definition."""
    served = range(heads) if branch.heads is None else branch.heads
    if h not in served or (pattern.causal and branch.slices is None and j > i):
        return False
    if branch.slices is not None and not any(in_slice(one, i, j) for one in branch.slices):
        return False
    if pattern.documents is not None:
        ends = list(accumulate(pattern.documents))
        document = bisect_right(ends, i)
        begin = ends[document] - pattern.documents[document]
        if not begin <= j < ends[document]:
            return False
        i, j = i - begin, j - begin
    o = branch.offset[h - served.start] if isinstance(branch.offset, tuple) else branch.offset
    w, r = branch.segment_length or max(i, j) + 1, branch.dilation_rate
    on_grid = [p % w >= o and (p % w - o) % r == 0 for p in (i, j)]
    near = branch.window is None or abs(i - j) <= branch.window
    return i // w == j // w and all(on_grid) and near


def loops(x: Example, pattern: Pattern, scale: float | None = None, detached: bool = False) -> list[Tensor]:
    """out, lse, dq, dk, dv and, with sinks, dsinks for moderate scores, as LongNet's equations 9-10 have them: each
    branch alone, weighted by its softmax denominator, which backward takes for a constant if detached. A sink is a
    branch of output 0."""
    q, k, v = (t.clone().requires_grad_() for t in x.qkv)
    sinks = None if x.sinks is None else x.sinks.clone().requires_grad_()
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    i_positions = x.at.get("q_positions", torch.arange(q.shape[1])).tolist()
    j_positions = x.at.get("k_positions", torch.arange(k.shape[1])).tolist()
    out, lse = torch.zeros_like(x.dout), torch.full_like(x.dlse, -torch.inf)
    loss = 0.0 * (q.sum() + k.sum() + v.sum())
    if sinks is not None:
        loss = loss + 0.0 * sinks.exp().sum()
    for b, h, a in np.ndindex(q.shape[0], heads, q.shape[1]):
        denominators, means = [], []
        for branch in pattern.branches:
            i = i_positions[a]
            seen = [c for c, j in enumerate(j_positions) if sees(pattern, branch, h, i, j, heads)]
            if seen:
                scores = scale * k[b, seen, h // group] @ q[b, a, h]
                weights = (scores if x.softcap is None else x.softcap * (scores / x.softcap).tanh()).exp()
                denominators.append(weights.sum())
                means.append(weights @ v[b, seen, h // group] / weights.sum())
        if sinks is not None and sinks[h] > -torch.inf:
            denominators.append(sinks[h].exp())
            means.append(torch.zeros_like(x.dout[b, a, h]))
        if denominators:
            total = torch.stack(denominators)
            shares = total / total.sum()
            mean = (shares.detach() if detached else shares) @ torch.stack(means)
            loss = loss + x.dout[b, a, h] @ mean + x.dlse[b, h, a] * total.sum().log()
            out[b, a, h], lse[b, h, a] = mean.detach(), total.detach().sum().log()
    return [out.detach(), lse, *torch.autograd.grad(loss, (q, k, v) if sinks is None else (q, k, v, sinks))]


def everything(x: Example, pattern: Pattern, scale: float | None = None, weights: str = "attached") -> list[Tensor]:
    options: dict[str, Any] = {"scale": scale, "sinks": x.sinks, "softcap": x.softcap, **x.at}
    out, lse = attention(*x.qkv, pattern, **options)
    return [out, lse, *gradients(*x.qkv, pattern, x.dout, x.dlse, weights=weights, **options)]


def assert_all_close(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **CLOSE, err_msg=f"result {index}")
