"""One call of each fused kernel, by its name, on a batch of one length or on sequences of several lengths.

Operands are (B, N, H, D), or (tokens, H, D) with cumulative lengths. On the CPU every kernel is the substitute of
`bench.fused`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import fused
from ring.compute.kernels import MEASURED

KERNELS = tuple(kernel.name for kernel in MEASURED)
Grads = tuple[Tensor, ...]


class Saved(NamedTuple):
    """Results of a forward for its backward. rest: of cuDNN, its random state."""

    out: Tensor
    lse: Tensor
    rest: tuple[Tensor, ...] = ()


class Call(NamedTuple):
    """forward: q, k, v -> Saved. backward: dout, q, k, v, saved -> dq, dk, dv."""

    forward: Callable[[Tensor, Tensor, Tensor], Saved]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Saved], Grads]


class Sizes(NamedTuple):
    """Lengths of queries and keys of each sequence, whether the mask is causal, heads and head dim."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    causal: bool
    heads: int
    kv_heads: int
    dim: int

    @property
    def flops(self) -> tuple[int, int]:
        """Operations of a forward and of a backward: 2 and 5 products."""
        pairs = sum(q * (q + 1) // 2 if self.causal else q * k for q, k in zip(self.query, self.key, strict=True))
        return 4 * pairs * self.heads * self.dim, 10 * pairs * self.heads * self.dim

    def draw(self, device: torch.device, packed: bool) -> Grads:
        """Draw q, k, v and the gradient of the output. packed: sequences follow each other, else they are a batch."""
        generator = torch.Generator(device).manual_seed(1)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def normal(lengths: tuple[int, ...], heads: int) -> Tensor:
            rows = (sum(lengths),) if packed else (len(lengths), lengths[0])
            return torch.randn(*rows, heads, self.dim, generator=generator, device=device, dtype=dtype)

        q, k, v = (normal(self.query, self.heads), *(normal(self.key, self.kv_heads) for _ in range(2)))
        return q, k, v, normal(self.query, self.heads)


def call_of(name: str, sizes: Sizes, device: torch.device, packed: bool) -> Call:
    """Return the call of a kernel, one of KERNELS. packed: as in `Sizes.draw`."""
    scale, longest = sizes.dim**-0.5, (max(sizes.query), max(sizes.key))
    on_gpu = device.type == "cuda"
    if not packed:
        if name == "flash" and on_gpu:
            none = None, None, *longest
            return Call(partial(_flash_forward, none, sizes), partial(_flash_backward, none, sizes))
        whole = partial(fused.forward, scale=scale, causal=sizes.causal)
        return _of_fused(name, whole, partial(fused.backward, scale=scale, causal=sizes.causal))
    query_edges, key_edges = (_edges(lengths, device) for lengths in (sizes.query, sizes.key))
    if name == "cudnn" and on_gpu:
        edges = query_edges, key_edges, *longest
        return Call(partial(_cudnn_forward, edges, sizes), partial(_cudnn_backward, edges, sizes))
    varlen = fused.Varlen(scale, query_edges, key_edges, *longest, causal=sizes.causal)
    return _of_fused(name, varlen.forward, varlen.backward)


def _edges(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _of_fused(name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Grads]) -> Call:
    """Return a call of `bench.fused` on FlashAttention-4 or on torch's kernels."""
    kernel = "fa4" if name == "fa4" else "torch"

    def forwards(q: Tensor, k: Tensor, v: Tensor) -> Saved:
        with fused.kernel(kernel):
            return Saved(*forward(q, k, v))

    def backwards(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> Grads:
        with fused.kernel(kernel):
            return backward(dout, q, k, v, saved.out, saved.lse)

    return Call(forwards, backwards)


def _flash_forward(edges: Any, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *edges, 0.0, sizes.causal, False, scale=sizes.dim**-0.5
    )
    return Saved(out, lse)


def _flash_backward(edges: Any, sizes: Sizes, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> Grads:
    none = fused.no_dropout(q.device)
    grads: Grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, saved.out, saved.lse, *edges, 0.0, sizes.causal, none, none, scale=sizes.dim**-0.5
    )
    return grads


def _cudnn_forward(edges: Any, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, *edges, True, 0.0, sizes.causal, False, scale=sizes.dim**-0.5
    )
    return Saved(out, lse, (seed, offset))


def _cudnn_backward(edges: Any, sizes: Sizes, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> Grads:
    grads: Grads = torch.ops.aten._cudnn_attention_backward(
        dout, q, k, v, saved.out, saved.lse, *saved.rest, None, *edges, 0.0, sizes.causal, scale=sizes.dim**-0.5
    )
    return grads
