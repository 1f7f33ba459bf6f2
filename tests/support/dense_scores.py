"""Attention with sinks, a softcap and a value head dim by its formula, in fp64, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.fast_oracle import multiplicity
from reference.pattern import Pattern


def dense(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) of whole tensors: q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hk, Dv), sinks (H,)."""
    share, n = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(share, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    count = torch.as_tensor(multiplicity(pattern, q.shape[2], n))
    b = torch.full((q.shape[2],), -torch.inf, dtype=q.dtype) if sinks is None else sinks
    scores = torch.cat((scores + count.log(), b[None, :, None, None].expand(q.shape[0], -1, n, 1)), -1)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    probabilities = weights[..., :-1] / total.masked_fill(total == 0.0, 1.0)
    lse = torch.where(total > 0.0, top + total.masked_fill(total == 0.0, 1.0).log(), -torch.inf).squeeze(-1)
    return torch.einsum("bhij,bjhd->bihd", probabilities, v), lse


def results(
    given: Sequence[Tensor | None], pattern: Pattern, *, scale: float | None = None, softcap: float | None = None
) -> dict[str, Tensor]:
    """Return out, lse and all gradients, by name. given: q, k, v, sinks, dout, dlse; sinks and dlse may be None."""
    *inputs, dout, dlse = given
    names = {name: x for name, x in zip(("dq", "dk", "dv", "dsinks"), inputs, strict=True) if x is not None}
    leaves = [x.detach().double().requires_grad_() for x in names.values()]
    q, k, v, *sinks = leaves
    out, lse = dense(q, k, v, pattern, scale=scale, softcap=softcap, sinks=sinks[0] if sinks else None)
    assert dout is not None
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.double()).sum()
    grads = torch.autograd.grad(loss, leaves)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}
