"""Attention of one call by torch's own kernels, forward and backward, with lse: baselines and peers run on it.

On a GPU it is cuDNN's kernel, which takes bf16 and fp16 and any number of key/value heads; on the CPU it is the
stand-in for flash_attn, which uses matrix products and a softmax. No code of ring/ is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verification.peers.adapters import flash_attn_shim


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, Nq, H, D), k, v (B, Nk, Hk, D), any strides but that of D -> out (B, Nq, H, D), lse (B, H, Nq) in fp32.

    causal: query i sees keys 0 .. i; for Nq = Nk only.
    """
    assert not causal or q.shape[1] == k.shape[1]
    if q.device.type != "cuda":
        out, lse, _, _ = flash_attn_shim.forward(q, k, v, 0.0, scale, causal)
        return out, lse
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return found[0].transpose(1, 2), found[1].reshape(query.shape[:3])  # lse comes as (B, H, Nq, 1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, shaped like q, k, v. out and lse may be those of a softmax over more keys."""
    if q.device.type != "cuda":
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        flash_attn_shim.backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal)
        return dq, dk, dv
    d, query, key, value, o = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    if not query.stride() == o.stride() == d.stride():  # torch (2.11) keeps a backward by the strides of q, k, v alone
        d, query, o = (x.contiguous() for x in (d, query, o))
    unused = _no_dropout(q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d, query, key, value, o, lse.unsqueeze(-1).contiguous(), unused, unused, None, None, None,
        q.shape[1], k.shape[1], 0.0, causal, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


@lru_cache(maxsize=8)
def _no_dropout(device: torch.device) -> Tensor:
    """The kernel asks for the state of a random generator, which it does not use without dropout."""
    return torch.zeros((), dtype=torch.int64, device=device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = scale, causal
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(gradients[0], q, k, v, out, lse, *ctx.rest), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`forward`, differentiable through out; no gradient flows through lse."""
    out, lse = _Attention.apply(q, k, v, scale, causal)
    return out, lse


def packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Sequence[int], window: int | None = None
) -> Tensor:
    """Causal attention within documents, in one call of torch's FlashAttention-2 for variable lengths; on the CPU one
    document after the other. Shapes as in `forward`, with B = 1. window: positions that a row sees before its own."""
    if q.device.type != "cuda":
        parts = zip(*(x.split([d for d in documents if d], dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([_alone(one, two, three, scale, window) for one, two, three in parts], 1)
    edges, longest = _cu_seqlens(tuple(documents), q.device), max(documents)
    out: Tensor = _Packed.apply(q, k, v, Varlen(scale, edges, edges, longest, longest, window))
    return out


def _alone(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    if window is None:
        return attention(q, k, v, scale, True)[0]
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril().triu(-window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@lru_cache(maxsize=8)
def _cu_seqlens(documents: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(documents)], dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Varlen:
    """A call of several lengths: where the queries of each sequence begin and end, int32 on the device, where the keys
    do, and the longest of each. causal: the last query sees the last key, the one before it the one before, and so on.
    window: positions that a row sees before its own, if causal."""

    scale: float
    query_edges: Tensor
    key_edges: Tensor
    longest_query: int
    longest_key: int
    window: int | None = None
    causal: bool = True

    @property
    def options(self) -> dict[str, float]:
        return {"scale": self.scale} | ({} if self.window is None else {"window_size_left": self.window})

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q (Nq, H, D), k, v (Nk, Hk, D) on a GPU -> out (Nq, H, D), lse (H, Nq) in fp32."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, self.query_edges, self.key_edges, self.longest_query, self.longest_key, 0.0, self.causal, False,
            **self.options,
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, shaped like q, k, v."""
        unused = _no_dropout(q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, self.query_edges, self.key_edges, self.longest_query, self.longest_key, 0.0,
            self.causal, unused, unused, **self.options,
        )  # fmt: skip
        return dq, dk, dv


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Varlen) -> Tensor:
        query, key, value = (x.squeeze(0) for x in (q, k, v))
        out, lse = call.forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.call.backward(gradients[0].squeeze(0), *ctx.saved_tensors)
        return *(x.unsqueeze(0) for x in found), None
