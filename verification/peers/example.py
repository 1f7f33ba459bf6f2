"""An adapter to copy: attention over keys and values that DTensor gathers, and whose backward sums their gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from verification.case import Case
from verification.peers import Peer, claims


def nearest_supported(case: Case) -> Case | None:
    """Return the nearest Case that the attention supports, or None."""
    case = claims.dense(claims.all_ranks(claims.without_own_settings(case)), causal=True)
    case = claims.in_dtypes(claims.even_shards(case, "contiguous"), "float32")
    return claims.equal_heads(claims.default_scale(claims.without_lse(case)))


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup, first: int | None = None) -> Tensor:
    """Return the output of this rank's tokens: all (B, tokens, H, D). first: the position of the first query."""
    first = group.rank() * q.shape[1] if first is None else first
    mesh = DeviceMesh.from_group(group, q.device.type)
    k, v = (DTensor.from_local(x, mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()]) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], case.tokens, dtype=torch.bool, device=q.device).tril(first)
    with sdpa_kernel(SDPBackend.MATH):  # on GPUs others do not repeat their bits, or refuse strides
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    return out.transpose(1, 2)


adapter = Peer("my attention", "dense causal, fp32, even contiguous shards", nearest_supported, attend)
wrong = replace(adapter, name="wrong", attend=partial(attend, first=0))  # as if every shard began at position 0
