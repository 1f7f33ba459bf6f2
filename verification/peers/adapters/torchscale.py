"""microsoft/torchscale (`torchscale`): LongNet's dilated attention in one process, without its linear projections.

The package's own code gathers a branch's rows, scatters the results and mixes the branches. Inside a branch,
`flash_attn_shim.attention` stands in for flash_attn, in fp32 and fp64. The package pads segments, dilations and heads
that do not divide, so it supports all of them.

Releases up to 0.3.0 have no dilated attention; the repository has it since commit 11e745e:
    pip install --no-deps git+https://github.com/microsoft/torchscale
"""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from reference.pattern import Pattern
from verification.case import Case
from verification.failures import Refused
from verification.peers import claims
from verification.peers.adapters.flash_attn_shim import attention
from verification.peers.peer import Peer, Result

MODULE = "torchscale.component.dilated_attention"


def prepare() -> None:
    try:
        importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name not in ("torchscale", MODULE):
            raise
        raise Refused(
            f"there is no {MODULE}: releases of torchscale up to 0.3.0 do not have it, the repository does: "
            "pip install --no-deps git+https://github.com/microsoft/torchscale"
        ) from error
    # The package's attention looks up flash_attn by this name.
    importlib.import_module("torchscale.component.multihead_attention").__dict__["flash_attn_func"] = flash_attn_func


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: None, softmax_scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Replacement with the arguments that the package passes: q (B, N, H, D) -> out, lse (B, H, N)."""
    assert not dropout and bias is None
    return attention(q, k, v, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, is_causal)


def claimed(case: Case) -> Case:
    """Keep the Case's segment lengths and dilation rates, each for all heads, with the package's offsets."""
    case = claims.plain_process(case)
    segments, dilations = zip(*((b.segment_length, b.dilation_rate) for b in case.pattern.branches), strict=True)
    pattern = Pattern.longnet(segments, dilations, case.heads, case.pattern.causal, offsets="torchscale")
    return dataclasses.replace(case, pattern=pattern)


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    branches = case.pattern.branches
    settings = SimpleNamespace(
        flash_attention=True, seq_parallel=False, xpos_rel_pos=False, multiway=False,
        segment_length=[case.tokens if b.segment_length is None else b.segment_length for b in branches],
        dilated_ratio=[b.dilation_rate for b in branches],
    )  # fmt: skip
    width = case.heads * case.head_dim
    with torch.random.fork_rng(devices=()):  # of weights, which are not used
        module: Any = importlib.import_module(MODULE).DilatedAttention(settings, width, case.heads, self_attention=True)
    for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, projection, nn.Identity())
    module.dropout = 0.0
    out, _ = module(*(x.flatten(2) for x in (q, k, v)), is_causal=case.pattern.causal)
    return out.unflatten(2, (case.heads, case.head_dim))


adapter = Peer(
    "torchscale",
    "LongNet's branches of any segment length and dilation, offsets by groups of heads, causal or not, one process, "
    "fp32 and fp64, equal heads, head_dim ** -0.5 as scale",
    claimed, attend, worlds=(1,), package="torchscale", prepare=prepare,
)  # fmt: skip
