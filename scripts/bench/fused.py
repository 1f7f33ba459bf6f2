"""One attention call on a fused kernel, forward and backward, with lse, for baselines and peers. It uses no `ring`.

On a GPU it calls torch's kernels, for bf16 and fp16 and any number of key/value heads: cuDNN, or FlashAttention-2 for
several lengths. Within `kernel("fa4")` it calls FlashAttention-4 for both. On the CPU it is the substitute for
flash_attn, by matrix products and a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verification.peers.adapters import flash_attn_shim

KERNELS = ("torch", "fa4")
_chosen = [KERNELS[0]]  # no context variable: autograd runs backwards in threads of its own


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Return a context in which calls on a GPU use this kernel, one of KERNELS."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def current() -> str:
    """Return the kernel of calls on a GPU."""
    return _chosen[-1]


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend q (B, Nq, H, D) to k, v (B, Nk, Hk, D), contiguous in D -> out (B, Nq, H, D), lse (B, H, Nq) in fp32.

    causal: query i sees keys 0 .. i; for Nq = Nk only.
    """
    assert not causal or q.shape[1] == k.shape[1]
    if q.device.type != "cuda":
        return flash_attn_shim.forward(q, k, v, 0.0, scale, causal)[:2]
    if current() == "fa4":
        return _fa4_forward(q, k, v, softmax_scale=scale, causal=causal)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.reshape(query.shape[:3])  # lse is (B, H, Nq, 1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, shaped like q, k, v. out and lse may be of a softmax over more keys."""
    if q.device.type != "cuda":
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        flash_attn_shim.backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal)
        return dq, dk, dv
    if current() == "fa4":
        return _fa4_backward(q, k, v, out, dout, lse, softmax_scale=scale, causal=causal)
    d, query, key, value, o = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    if not query.stride() == o.stride() == d.stride():  # torch (2.11) caches a backward by the strides of q, k, v alone
        d, query, o = (x.contiguous() for x in (d, query, o))
    unused = no_dropout(q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d, query, key, value, o, lse.unsqueeze(-1).contiguous(), unused, unused, None, None, None,
        q.shape[1], k.shape[1], 0.0, causal, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, lse


def _fa4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    fixed = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse, deterministic=fixed, **options)
    return dq, dk, dv


@lru_cache(maxsize=8)
def no_dropout(device: torch.device) -> Tensor:
    """Return a placeholder for the state of the random generator, unused without dropout."""
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(grads[0], q, k, v, out, lse, *ctx.rest), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute `forward`, differentiable through out but not through lse."""
    out, lse = _Attention.apply(q, k, v, scale, causal)
    return out, lse


@dataclass(frozen=True)
class Varlen:
    """A call of several lengths.

    query_edges, key_edges      boundaries of the sequences, int32 on the device
    longest_query, longest_key  longest sequence
    window                      positions that a row sees before its own, if causal
    causal                      aligned at the last query and key
    """

    scale: float
    query_edges: Tensor
    key_edges: Tensor
    longest_query: int
    longest_key: int
    window: int | None = None
    causal: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend q (Nq, H, D) to k, v (Nk, Hk, D) -> out (Nq, H, D), lse (H, Nq) in fp32."""
        if q.device.type != "cuda":
            return flash_attn_shim.varlen_forward(q, k, v, *self._lengths, 0.0, self.scale, self.causal, self._left)[:2]
        if current() == "fa4":
            return _fa4_forward(q, k, v, **self._fa4_options)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._lengths, 0.0, self.causal, False, **self._options
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv, shaped like q, k, v."""
        if q.device.type != "cuda":
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            flash_attn_shim.varlen_backward(
                dout, q, k, v, out, lse, dq, dk, dv, *self._lengths, 0.0, self.scale, self.causal, self._left
            )
            return dq, dk, dv
        if current() == "fa4":
            return _fa4_backward(q, k, v, out, dout, lse, **self._fa4_options)
        unused = no_dropout(q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *self._lengths, 0.0, self.causal, unused, unused, **self._options
        )
        return dq, dk, dv

    @property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.query_edges, self.key_edges, self.longest_query, self.longest_key

    @property
    def _fa4_options(self) -> dict[str, Any]:
        window = {} if self.window is None else {"window_size_left": self.window, "window_size_right": 0}
        return {
            "softmax_scale": self.scale, "causal": self.causal, "cu_seqlens_q": self.query_edges,
            "cu_seqlens_k": self.key_edges, "max_seqlen_q": self.longest_query, "max_seqlen_k": self.longest_key,
        } | window  # fmt: skip

    @property
    def _left(self) -> int:
        return -1 if self.window is None else self.window

    @property
    def _options(self) -> dict[str, float]:
        return {"scale": self.scale} | ({} if self.window is None else {"window_size_left": self.window})


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Varlen) -> Tensor:
        query, key, value = (x.squeeze(0) for x in (q, k, v))
        out, lse = call.forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_grads = ctx.call.backward(grads[0].squeeze(0), *ctx.saved_tensors)
        return *(x.unsqueeze(0) for x in input_grads), None


def packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Sequence[int], window: int | None = None
) -> Tensor:
    """Attend causally within documents, in one differentiable call. Shapes as in `forward`, with B = 1. window:
    positions that a row sees before its own."""
    edges, longest = document_edges(tuple(documents), q.device), max(documents)
    out: Tensor = _Packed.apply(q, k, v, Varlen(scale, edges, edges, longest, longest, window))
    return out


@lru_cache(maxsize=8)
def document_edges(documents: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the boundaries of documents, (documents + 1,), int32."""
    return torch.tensor([0, *accumulate(documents)], dtype=torch.int32, device=device)
