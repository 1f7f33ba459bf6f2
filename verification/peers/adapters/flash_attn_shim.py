"""A stand-in on the CPU for the package flash_attn, which needs a GPU: the two functions that public ring code calls.

Semantics as flash_attn 2.6.3 documents them: layout (B, tokens, heads, dim); groups of query heads share a key/value
head; a causal mask is aligned to the last query and the last key; out has the inputs' type, lse (B, H, Nq) is float32;
a row that sees nothing has output 0 and lse inf; the backward takes the lse and the output of the whole softmax.
Products are formed in float32 for all inputs, under autocast too, and results are rounded once, to the inputs' type.

Dropout, windows, soft caps, ALiBi and packed sequences are refused.
"""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import torch
from torch import Tensor

VERSION = "2.6.3"  # whose signatures these are


def install() -> None:
    """Makes `import flash_attn` return this stand-in in this process, even where flash_attn is installed: the ranks
    compute on the CPU, where that does not run."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = []
    names: dict[str, Any] = {
        "_flash_attn_forward": forward,
        "_flash_attn_backward": backward,
        "_flash_attn_varlen_forward": refused,
        "_flash_attn_varlen_backward": refused,
        "flash_attn_func": refused,
    }
    for name, function in names.items():
        setattr(interface, name, function)
    for name, value in (("flash_attn_interface", interface), ("flash_attn_func", refused), ("__version__", VERSION)):
        setattr(package, name, value)
    sys.modules |= {package.__name__: package, interface.__name__: interface}


def refused(*arguments: object, **named: object) -> None:
    raise NotImplementedError("the stand-in for flash_attn has _flash_attn_forward and _flash_attn_backward only")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """q (B, Nq, H, D), k, v (B, Nk, Hk, D) -> out (B, Nq, H, D), lse (B, H, Nq) and two unused fields."""
    refuse_options(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    with torch.autocast(q.device.type, enabled=False):  # which a kernel does not look at
        scores = masked_scores(q, k, softmax_scale, causal)
        lse = scores.logsumexp(-1)
        dead = lse == -math.inf
        p = (scores - lse.masked_fill(dead, 0.0).unsqueeze(-1)).exp()
        out = torch.einsum("bhij,bjhd->bihd", p, expanded(v, q))
    return out.to(q.dtype), lse.masked_fill(dead, math.inf), None, None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes the gradients of q, k, v into dq, dk, dv. out and softmax_lse are those of the whole softmax."""
    refuse_options(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    scores = masked_scores(q, k, softmax_scale, causal)
    p = (scores - softmax_lse.float().unsqueeze(-1)).exp()  # lse inf: 0
    wide = dout.float()
    delta = (wide * out.float()).sum(-1).transpose(1, 2).unsqueeze(-1)  # (B, H, Nq, 1)
    ds = p * (torch.einsum("bihd,bjhd->bhij", wide, expanded(v, q)) - delta) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, expanded(k, q)))
    dk.copy_(summed_by_group(torch.einsum("bhij,bihd->bjhd", ds, q.float()), k))
    dv.copy_(summed_by_group(torch.einsum("bhij,bihd->bjhd", p, wide), v))


def masked_scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """float32 (B, H, Nq, Nk)."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), expanded(k, q)) * scale
    if not causal:
        return scores
    rows, keys = scores.shape[-2:]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return scores.masked_fill(~seen, -math.inf)


def expanded(x: Tensor, q: Tensor) -> Tensor:
    """float32 (B, N, Hk, D) -> (B, N, H, D): each key/value head for its group of query heads."""
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def summed_by_group(gradient: Tensor, x: Tensor) -> Tensor:
    """(B, N, H, D) -> (B, N, Hk, D): summed over the group of query heads."""
    return gradient.unflatten(2, (x.shape[2], -1)).sum(3)


def refuse_options(dropout_p: float, left: int, right: int, softcap: float | None, alibi_slopes: Tensor | None) -> None:
    if dropout_p or (left, right) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError(
            "the stand-in for flash_attn has no dropout, window, soft cap or ALiBi, got "
            f"dropout_p={dropout_p}, window_size=({left}, {right}), softcap={softcap}, alibi_slopes={alibi_slopes}"
        )
