"""The ring behind torch's own `context_parallel` (torch.distributed.tensor.experimental).

`context_parallel` itself replaces three CUDA kernels only, and raises on the CPU (torch 2.13). But its ring takes the
kernel as an argument. So `_templated_ring_attention` and its backward (rotation, load balance, merge of partial
results, rotation of gradients) run here over gloo, with the stand-in for flash_attn. These names are private, so
another release may not have them.

A Case's exchange selects the rotation: "gather" is all-gather, "ring" is all-to-all. As in `context_parallel`, causal
attention is load-balanced, which is zigzag order; the rest is contiguous.

Packed documents are not run: `_PerDocumentHeadTailLoadBalancer` is for flex attention only, which has no backward on
CPUs, and whose masks need multiples of 128 tokens per rank (torch 2.13). The ring supports no window.
"""

from __future__ import annotations

import dataclasses
import importlib
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.failures import Refused
from verification.peers import claims
from verification.peers.adapters.flash_attn_shim import aten_backward, aten_forward
from verification.peers.peer import Peer, Result

MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
REQUIRED = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "set_rotate_method")


def prepare() -> None:
    module = None
    with suppress(ModuleNotFoundError):
        module = importlib.import_module(MODULE)
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        raise Refused(f"torch {torch.__version__} has no {', '.join(missing)} in {MODULE}; torch 2.13 has")


def claimed(case: Case) -> Case:
    exchange = "gather" if case.exchange == "gather" else "ring"
    case = claims.dense(claims.two_ranks_or_more(claims.without_own_settings(case)))
    case = claims.even_shards(case, "zigzag", 2) if case.pattern.causal else claims.even_shards(case, "contiguous")
    case = claims.equal_heads(claims.without_lse(claims.in_dtypes(case, "float32", "bfloat16", "float16")))
    return dataclasses.replace(case, exchange=exchange)


class _TorchRing(torch.autograd.Function):
    """Autograd function of torch's ring, as the dispatcher has it for aten's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: ProcessGroup) -> Tensor:
        ring = importlib.import_module(MODULE)._templated_ring_attention
        out, lse = ring(group, 2, aten_forward, query=q, key=k, value=v, is_causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = causal, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (causal, scale, group), (q, k, v, out, lse) = ctx.settings, ctx.saved_tensors
        ring = importlib.import_module(MODULE)._templated_ring_attention_backward
        grads = ring(
            group, 2, aten_backward, grad_out=incoming[0], grad_out_name="grad_out", query=q, key=k, value=v,
            out=out, logsumexp=lse, is_causal=causal, scale=scale,
        )  # fmt: skip
        return *grads, None, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    module = importlib.import_module(MODULE)
    module._cp_options.enable_load_balance = case.pattern.causal
    module.set_rotate_method("allgather" if case.exchange == "gather" else "alltoall")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = _TorchRing.apply(q, k, v, case.pattern.causal, case.softmax_scale, group)
    return out.transpose(1, 2)


adapter = Peer(
    "torch-context-parallel",
    "dense; causal in zigzag order (load balance), not causal contiguous; shards of one length, all-gather and "
    "all-to-all rotation, fp32, bf16, fp16, equal heads, any scale, subgroups of two ranks or more",
    claimed, attend, package="torch", arithmetic="half", merge="interpolated", prepare=prepare,
)  # fmt: skip
