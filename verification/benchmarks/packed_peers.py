"""ring-flash-attn's llama3 function for packed documents and windows, on the kernel of the baseline.

It takes contiguous shards of one length, gathers keys and values, some heads at a time, and makes one call of several
lengths for the documents that a rank has a part of.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verification.benchmarks import fused
from verification.benchmarks.baselines import Impossible
from verification.benchmarks.contender import Contender, Inputs
from verification.benchmarks.workload import Workload
from verification.peers.adapters import flash_attn_shim, ring_flash_attn, ring_flash_attn_varlen
from verification.peers.peer import Refused


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
    flash_attn_shim.refuse_options(dropout_p, softcap, alibi_slopes)
    flash_attn_shim.refuse_probabilities(return_softmax)
    flash_attn_shim.refuse_pages(block_table)
    assert causal  # the window's other side, behind a row, then does not matter
    window = None if window_size_left < 0 else window_size_left
    call = fused.Varlen(softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
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
    assert causal
    window = None if window_size_left < 0 else window_size_left
    call = fused.Varlen(softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    for place, gradient in zip((dq, dk, dv), call.backward(dout, q, k, v, out, softmax_lse), strict=True):
        place.copy_(gradient)


@contextmanager
def llama3(workload: Workload, inputs: Inputs, rank: int, heads: int) -> Iterator[Contender]:
    """inputs: of `workload.tokens` tokens. heads: key/value heads that are gathered at a time.

    Raises Impossible where it is not installed, or cannot be imported."""
    module, device = _module(), inputs[0].device
    documents, window = workload.pattern.documents or (workload.total,), workload.pattern.branches[0].window
    edges = torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
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
def _kernels(module: Any) -> Iterator[None]:
    """Inside, it calls the kernel of the baseline."""
    before = module._flash_attn_varlen_forward, module._flash_attn_varlen_backward
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = varlen_forward, varlen_backward
    try:
        yield
    finally:
        module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = before


def _module() -> Any:
    try:
        ring_flash_attn_varlen.prepare()
    except (Refused, ImportError) as error:
        raise Impossible(f"ring-flash-attn cannot be run: {error}") from error
    return importlib.import_module(f"{ring_flash_attn.PACKAGE}.llama3_flash_attn_varlen")
