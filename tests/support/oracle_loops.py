"""Attention and its gradients by loops written straight from the formulas, and by a mixture that autograd follows."""

from collections.abc import Sequence
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference import Branch, Pattern, attention, gradients
from reference.pattern import multiplicity

# fp64, at most some dozens of terms of size ~1: rounding stays a thousand times below this.
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


class Example(NamedTuple):
    q: Tensor  # (B, Nq, Hq, D)
    k: Tensor  # (B, Nk, Hk, D)
    v: Tensor
    dout: Tensor  # (B, Nq, Hq, D)
    dlse: Tensor  # (B, Hq, Nq)
    at: dict[str, Any]  # positions, where they are given

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


Tokens = int | list[int]  # how many, or their positions


def example(queries: Tokens, keys: Tokens, heads: int = 2, kv_heads: int = 2, batch: int = 1, dim: int = 3) -> Example:
    """Seeded normal values."""
    generator = torch.Generator().manual_seed(7)
    given = {"q_positions": queries, "k_positions": keys}
    at = {name: torch.tensor(p, dtype=torch.int64) for name, p in given.items() if isinstance(p, list)}
    n_q, n_k = (p if isinstance(p, int) else len(p) for p in (queries, keys))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k, v = normal(batch, n_k, kv_heads, dim), normal(batch, n_k, kv_heads, dim)
    q, dout = normal(batch, n_q, heads, dim), normal(batch, n_q, heads, dim)
    return Example(q, k, v, dout, normal(batch, heads, n_q), at)


def sees(branch: Branch, h: int, i: int, j: int, heads: int, causal: bool) -> bool:
    """M_b[h, i, j] from its definition."""
    served = range(heads) if branch.heads is None else branch.heads
    if h not in served or (causal and j > i):
        return False
    o = branch.offset[h - served.start] if isinstance(branch.offset, tuple) else branch.offset
    w, r = branch.segment_length or max(i, j) + 1, branch.dilation_rate
    on_grid = [p % w >= o and (p % w - o) % r == 0 for p in (i, j)]
    near = branch.window is None or abs(i - j) <= branch.window
    return i // w == j // w and all(on_grid) and near


def loops(x: Example, pattern: Pattern, scale: float | None = None, detached: bool = False) -> tuple[Any, ...]:
    """out, lse, dq, dk, dv by Python loops over batch, head, query, branch and key, for moderate scores."""
    q, k, v, dout, dlse = (t.numpy() for t in x[:5])
    batch, n_q, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    i_positions = x.at.get("q_positions", torch.arange(n_q)).tolist()
    j_positions = x.at.get("k_positions", torch.arange(k.shape[1])).tolist()
    out, lse = np.zeros_like(q), np.full((batch, heads, n_q), -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[2])
            for a, i in enumerate(i_positions):
                seen = [
                    (m, c)
                    for m, branch in enumerate(pattern.branches)
                    for c, j in enumerate(j_positions)
                    if sees(branch, h, i, j, heads, pattern.causal)
                ]
                if not seen:
                    continue
                weight = [exp(scale * sum(q[b, a, h, d] * k[b, c, g, d] for d in range(dim))) for _, c in seen]
                total = sum(weight)
                lse[b, h, a] = log(total)
                for (_, c), w in zip(seen, weight, strict=True):
                    out[b, a, h] += w / total * v[b, c, g]
                for (m, c), w in zip(seen, weight, strict=True):
                    mean = out[b, a, h]
                    if detached:  # the output of branch m alone
                        own = [(u, s) for (n, s), u in zip(seen, weight, strict=True) if n == m]
                        mean = sum(u * v[b, s, g] for u, s in own) / sum(u for u, _ in own)
                    ds = w / total * (dout[b, a, h] @ (v[b, c, g] - mean) + dlse[b, h, a])
                    dq[b, a, h] += scale * ds * k[b, c, g]
                    dk[b, c, g] += scale * ds * q[b, a, h]
                    dv[b, c, g] += w / total * dout[b, a, h]
    return out, lse, dq, dk, dv


def everything(x: Example, pattern: Pattern, scale: float | None = None, weights: str = "attached") -> list[Tensor]:
    out, lse = attention(x.q, x.k, x.v, pattern, scale=scale, **x.at)
    return [out, lse, *gradients(*x.qkv, pattern, x.dout, x.dlse, scale=scale, weights=weights, **x.at)]


def mixture(qkv: Sequence[Tensor], pattern: Pattern, detached: bool = False) -> tuple[Tensor, Tensor]:
    """LongNet, equations 9-10, differentiable: each branch alone, weighted by its softmax denominator.

    Returns out and the whole denominator, exp(lse) (B, H, Nq)."""
    q, k, v = qkv
    heads, points = q.shape[2], torch.arange(q.shape[1])
    k, v = (t.repeat_interleave(heads // k.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    outs, denominators = [], []
    for branch in pattern.branches:
        weight = multiplicity(Pattern((branch,), pattern.causal), points, points, heads) * s.exp()
        denominators.append(weight.sum(-1))  # (B, H, Nq)
        alone = weight / denominators[-1].unsqueeze(-1).clamp(min=1e-300)  # (B, H, Nq, Nk)
        outs.append(torch.einsum("bhij,bjhd->bihd", alone, v))
    total = torch.stack(denominators).sum(0)
    shares = [(d / total.clamp(min=1e-300)).transpose(1, 2).unsqueeze(-1) for d in denominators]
    shares = [share.detach() if detached else share for share in shares]
    return torch.stack([share * out for share, out in zip(shares, outs, strict=True)]).sum(0), total


def assert_all_close(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **CLOSE, err_msg=f"result {index}")
