"""ring-flash-attn's functions for packed documents, on the kernel of the baseline.

llama3 takes contiguous shards of one length, gathers keys and values, some heads at a time, and makes one call of
several lengths for the documents that a rank has a part of; it takes windows, too. ring and zigzag divide every
document among the ranks by itself, pass keys and values round, and make one call of several lengths for each shard.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from verification.benchmarks import fused
from verification.benchmarks.baselines import Impossible
from verification.benchmarks.contender import Contender, Inputs
from verification.benchmarks.workload import Workload
from verification.peers.adapters import flash_attn_shim, ring_flash_attn, ring_flash_attn_varlen
from verification.peers.peer import Refused

# Of each document a rank has one part, or two of twice as many.
RINGS = {"ring": 1, "zigzag": 2}


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """In place of flash_attn's _flash_attn_varlen_forward."""
    if q.device.type != "cuda":
        return flash_attn_shim.varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table,
        )  # fmt: skip
    flash_attn_shim.refuse_options(dropout_p, softcap, alibi_slopes, return_softmax, block_table)
    window = _window(window_size_left, causal)
    call = fused.Varlen(softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, causal)
    return *call.forward(q, k, v), None, None


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """In place of flash_attn's _flash_attn_varlen_backward."""
    if q.device.type != "cuda":
        flash_attn_shim.varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state,
        )  # fmt: skip
        return
    flash_attn_shim.refuse_options(dropout_p, softcap, alibi_slopes)
    window = _window(window_size_left, causal)
    call = fused.Varlen(softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, causal)
    for place, gradient in zip((dq, dk, dv), call.backward(dout, q, k, v, out, softmax_lse), strict=True):
        place.copy_(gradient)


def _window(left: int, causal: bool) -> int | None:
    """Its other side, behind a row, does not matter, if causal."""
    assert causal or left < 0
    return None if left < 0 else left


@contextmanager
def llama3(workload: Workload, inputs: Inputs, rank: int, heads: int) -> Iterator[Contender]:
    """inputs: of `workload.tokens` tokens. heads: key/value heads that are gathered at a time.

    Raises Impossible where it is not installed, or cannot be imported."""
    module, device = _module("llama3_flash_attn_varlen"), inputs[0].device
    window, edges = workload.pattern.branches[0].window, _edges(workload)
    of_queries, of_keys, *rest = module.llama3_flash_attn_prepare_cu_seqlens(edges, True, rank, workload.world)
    asked = of_queries.to(device), of_keys.to(device), *rest[:2], heads, rest[2]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = module.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *asked, causal=True, softmax_scale=workload.scale,
            window_size=(-1, -1) if window is None else (window, 0),
        )  # fmt: skip
        return found[None]

    with _kernels(module):
        yield Contender.of(attend, inputs, note="contiguous shards of one length")


@contextmanager
def by_document(workload: Workload, inputs: Inputs, ring: str) -> Iterator[Contender]:
    """ring: of RINGS. inputs: of `workload.tokens` tokens, as many of each document on every rank.

    Raises Impossible as `llama3` does, and where the lengths of documents do not divide."""
    documents, parts = workload.pattern.documents or (workload.total,), workload.world * RINGS[ring]
    if any(length % parts for length in documents):
        raise Impossible(f"it takes documents of lengths that {parts} divides (--divisible)")
    name = "ring_flash_attn_varlen" if ring == "ring" else "zigzag_ring_flash_attn_varlen"
    module = _module(name)
    function = getattr(module, f"{name}_func")
    edges, longest = (_edges(workload) // workload.world).to(inputs[0].device), max(documents) // workload.world

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = function(q[0], k[0], v[0], edges, longest, causal=True, softmax_scale=workload.scale)
        return found[None]

    with _kernels(module):
        yield Contender.of(attend, inputs, note="every document divided among the ranks by itself")


def _edges(workload: Workload) -> Tensor:
    """Where documents begin and end, (documents + 1,)."""
    documents = workload.pattern.documents or (workload.total,)
    return torch.tensor([0, *accumulate(documents)], dtype=torch.int32)


def _kernels(module: Any) -> AbstractContextManager[Any]:
    """Inside, it calls the kernel of the baseline."""
    return mock.patch.multiple(
        module, _flash_attn_varlen_forward=varlen_forward, _flash_attn_varlen_backward=varlen_backward
    )


def _module(name: str) -> Any:
    try:
        ring_flash_attn_varlen.prepare()
    except (Refused, ImportError) as error:
        raise Impossible(f"ring-flash-attn cannot be run: {error}") from error
    return importlib.import_module(f"{ring_flash_attn.PACKAGE}.{name}")
