"""fkodom/dilated-attention-pytorch (`dilated-attention-pytorch`): LongNet's dilated attention by groups of heads.

`DilatedAttention` runs in one process, over a stand-in for `xformers.ops.memory_efficient_attention`, which needs a
GPU. The package requires segments that divide the sequence; its groups need not divide the number of heads.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import types

from torch import Tensor
from torch.distributed import ProcessGroup

from reference.pattern import Pattern
from verification.case import Case
from verification.peers import claims
from verification.peers.adapters.flash_attn_shim import attention
from verification.peers.peer import Peer, Result

MODULE = "dilated_attention_pytorch.dilated_attention"


class LowerTriangularMask:
    """The only attention bias that the package uses."""


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: LowerTriangularMask | None = None, op: object = None
) -> Tensor:
    """Return out (B, N, H, D), as xformers documents it."""
    return attention(query, key, value, query.shape[-1] ** -0.5, isinstance(attn_bias, LowerTriangularMask))[0]


def prepare() -> None:
    package, operations = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    package.__path__ = []
    functions = {f.__name__: f for f in (memory_efficient_attention, LowerTriangularMask)}
    operations.__dict__.update(functions, AttentionOp=object)
    package.__dict__["ops"] = operations
    sys.modules |= {"xformers": package, "xformers.ops": operations}
    importlib.import_module(MODULE)


def claimed(case: Case) -> Case:
    """Use at most as many branches as heads, one group of heads each, with segments that divide the sequence."""
    case = claims.plain_process(case)
    branches = case.pattern.branches[: case.heads]
    segments = [math.gcd(b.segment_length or case.tokens, case.tokens) for b in branches]
    dilations = [b.dilation_rate for b in branches]
    pattern = Pattern.head_groups(segments, dilations, case.heads, case.pattern.causal)
    return dataclasses.replace(case, pattern=pattern)


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    branches = case.pattern.branches
    module = importlib.import_module(MODULE).DilatedAttention(
        segment_lengths=[b.segment_length for b in branches], dilation_rates=[b.dilation_rate for b in branches]
    )
    out: Tensor = module(q, k, v, is_causal=case.pattern.causal)
    return out


adapter = Peer(
    "dilated-attention-pytorch",
    "LongNet's branches by groups of heads, as equal as can be, segments that divide the sequence, any dilation, "
    "causal or not, one process, fp32 and fp64, equal heads, head_dim ** -0.5 as scale",
    claimed, attend, worlds=(1,), package="dilated-attention-pytorch", prepare=prepare,
)  # fmt: skip
