"""A CPU stand-in for the package flash_attn, which needs a GPU: the four functions that public ring code calls.

Semantics as documented by flash_attn 2.6.3:
- The layout is (B, tokens, heads, dim); groups of query heads share a key/value head.
- A causal mask is aligned to the last query and the last key.
- out has the inputs' dtype, lse (B, H, Nq) is float32. A row without visible keys has output 0 and lse inf.
- The backward takes the lse and the output of the whole softmax.
Products are computed in float32, also under autocast, or in float64 for such inputs; results are rounded once.

The varlen functions take sequences packed into one: (tokens, heads, dim), and lse is (H, tokens). Sequence i has the
queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys likewise, and is computed by itself as above.

Windows: query i sees the keys from i + Nk - Nq - left to i + Nk - Nq + right. -1 is no limit; causal sets right to 0.
"""

from __future__ import annotations

import math
import sys
import types
from importlib.machinery import ModuleSpec
from itertools import pairwise

import torch
from torch import Tensor


def install() -> None:
    """Make `import flash_attn` return this stand-in in this process, even if flash_attn is installed: ranks compute on
    the CPU, which flash_attn does not support."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = []
    package.__spec__ = ModuleSpec(package.__name__, None, is_package=True)  # others look for it
    functions = (forward, backward, varlen_forward, varlen_backward)
    interface.__dict__.update({f"_flash_attn_{f.__name__}": f for f in functions}, flash_attn_func=refused)
    package.__dict__.update(flash_attn_interface=interface, flash_attn_func=refused, __version__="2.6.3")
    sys.modules |= {package.__name__: package, interface.__name__: interface}


def refused(*arguments: object, **named: object) -> None:
    functions = "_flash_attn_forward, _flash_attn_varlen_forward and their backwards"
    raise NotImplementedError(f"the stand-in for flash_attn has {functions} only")


def forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """q (B, Nq, H, D), k, v (B, Nk, Hk, D) -> out (B, Nq, H, D), lse (B, H, Nq) and two unused fields."""
    refuse_options(dropout_p, softcap, alibi_slopes, return_softmax)
    with torch.autocast(q.device.type, enabled=False):  # kernels ignore autocast
        scores = masked_scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
        lse = scores.logsumexp(-1)
        dead = lse == -math.inf
        p = (scores - lse.masked_fill(dead, 0.0).unsqueeze(-1)).exp()
        # Kernels divide by the sum of the weights, which the rounded lse makes 1 only nearly.
        p = p / p.sum(-1, keepdim=True).masked_fill(dead.unsqueeze(-1), 1.0)
        out = torch.einsum("bhij,bjhd->bihd", p, expanded(v, q))
    return out.to(q.dtype), lse.masked_fill(dead, math.inf), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, Nq, H, D), k, v (B, Nk, Hk, D) -> out like q, lse (B, H, Nq); differentiable for rows with visible keys."""
    return forward(q, k, v, 0.0, scale, causal)[:2]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k, v into dq, dk, dv. out and softmax_lse are those of the whole softmax."""
    refuse_options(dropout_p, softcap, alibi_slopes)
    scores = masked_scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    p = (scores - wide(softmax_lse).unsqueeze(-1)).exp()  # lse inf: 0
    incoming = wide(dout)
    delta = (incoming * wide(out)).sum(-1).transpose(1, 2).unsqueeze(-1)  # (B, H, Nq, 1)
    ds = p * (torch.einsum("bihd,bjhd->bhij", incoming, expanded(v, q)) - delta) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, expanded(k, q)))
    dk.copy_(summed_by_group(torch.einsum("bhij,bihd->bjhd", ds, wide(q)), k))
    dv.copy_(summed_by_group(torch.einsum("bhij,bihd->bjhd", p, incoming), v))


def aten_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Stand in for aten's kernel: (B, H, N, D) -> out, lse (B, H, N)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, _, _ = forward(q, k, v, dropout_p, scale, is_causal)
    return out.transpose(1, 2), lse


def aten_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool,
    scale: float | None, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Stand in for the backward of aten's kernel: return dq, dk, dv, (B, H, N, D)."""
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    backward(dout, q, k, v, o, logsumexp, dq, dk, dv, dropout_p, scale, is_causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """q (Nq, H, D), k, v (Nk, Hk, D) -> out (Nq, H, D), lse (H, Nq) and two unused fields."""
    refuse_options(dropout_p, softcap, alibi_slopes, return_softmax, block_table)
    check_lengths(q, cu_seqlens_q, max_seqlen_q)
    check_lengths(k, cu_seqlens_k, max_seqlen_k)
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32)
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        results = forward(q[None, rows], k[None, keys], v[None, keys], *options)
        out[rows], lse[:, rows] = results[0][0], results[1][0]
    return out, lse, None, None


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k, v into dq, dk, dv. out and softmax_lse (H, Nq) are those of the whole softmax."""
    check_lengths(q, cu_seqlens_q, max_seqlen_q)
    check_lengths(k, cu_seqlens_k, max_seqlen_k)
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        backward(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], softmax_lse[None, :, rows],
            dq[None, rows], dk[None, keys], dv[None, keys], *options,
        )  # fmt: skip


def sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Slices of the queries and of the keys of each sequence."""
    edges = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in edges]


def check_lengths(x: Tensor, cu_seqlens: Tensor, longest: int) -> None:
    """Check that cu_seqlens is int32 and ascends from 0 to all tokens, and max_seqlen; a kernel checks neither."""
    edges = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in pairwise(edges)]
    if cu_seqlens.dtype != torch.int32 or edges[0] != 0 or edges[-1] != len(x) or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must ascend from 0 to {len(x)} in int32, got {edges} in {cu_seqlens.dtype}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen must be at least the longest sequence, {max(lengths)}, got {longest}")


def masked_scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """Scores (B, H, Nq, Nk) in fp32 or fp64; -inf for masked keys."""
    scores = torch.einsum("bihd,bjhd->bhij", wide(q), expanded(k, q)) * scale
    rows, keys = scores.shape[-2:]
    right = 0 if causal else right
    visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if right >= 0:
        visible = visible.tril(keys - rows + right)
    if left >= 0:
        visible = visible.triu(keys - rows - left)
    return scores.masked_fill(~visible, -math.inf)


def wide(x: Tensor) -> Tensor:
    """Cast to float32; keep float64."""
    return x if x.dtype == torch.float64 else x.float()


def expanded(x: Tensor, q: Tensor) -> Tensor:
    """(B, N, Hk, D) -> (B, N, H, D), wide: each key/value head for its group of query heads."""
    return wide(x).repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def summed_by_group(gradient: Tensor, x: Tensor) -> Tensor:
    """(B, N, H, D) -> (B, N, Hk, D): summed over the group of query heads."""
    return gradient.unflatten(2, (x.shape[2], -1)).sum(3)


def refuse_options(
    dropout_p: float, softcap: float | None, alibi_slopes: Tensor | None, return_softmax: bool = False,
    block_table: Tensor | None = None,
) -> None:  # fmt: skip
    """Refuse options that this stand-in lacks; flash_attn returns probabilities only with dropout."""
    if dropout_p or softcap or alibi_slopes is not None or return_softmax or block_table is not None:
        raise NotImplementedError(
            "the stand-in for flash_attn has no dropout, soft cap, ALiBi, probabilities or keys in pages, got "
            f"{dropout_p=}, {softcap=}, {alibi_slopes=}, {return_softmax=}, {block_table=}"
        )
