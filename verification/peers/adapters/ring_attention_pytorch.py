"""lucidrains/ring-attention-pytorch (`ring-attention-pytorch`): its ring in plain PyTorch, `ring_flash_attn`.

The package states neither dtypes nor accuracy; its own tests use fp32. It keeps sums in fp32 and the output in the
inputs' dtype, so fp64 would be computed in fp32, and 16-bit results merged in 16 bits: the claim is fp32.

With fewer key/value heads, its query head h uses key/value head h mod Hk, whereas in a Case neighbouring heads share
one: the claim is equal heads. With several buckets in a shard, its striped order interleaves buckets, which no Case
does: the claim is one bucket per shard. Its `max_lookback_seq_len` counts whole buckets, so it is not a window.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.peer import Peer, Result

MODULE = "ring_attention_pytorch.ring_flash_attention"


def claimed(case: Case, order: str, causal: bool | None) -> Case:
    """Reduce the Case's bucket until it divides a shard, as the package requires; striped shards are one bucket."""
    bucket = case.bucket
    case = claims.even_shards(claims.dense(claims.all_ranks(claims.without_own_settings(case)), causal), order)
    case = claims.without_lse(claims.default_scale(claims.in_dtypes(case, "float32")))
    local = case.tokens // case.world
    bucket = local if bucket is None or order == "striped" else math.gcd(bucket, local)
    return claims.equal_heads(dataclasses.replace(case, bucket=bucket))


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    out: Tensor = importlib.import_module(MODULE).ring_flash_attn(
        q, k, v, causal=case.pattern.causal, bucket_size=case.bucket, ring_reduce_col=True,
        striped_ring_attn=case.order == "striped",
    )  # fmt: skip
    return out


def variant(name: str, supported: str, claims: Callable[[Case], Case]) -> Peer:
    prepare = partial(importlib.import_module, MODULE)
    return Peer(name, supported, claims, attend, package="ring-attention-pytorch", prepare=prepare)


plain = variant(
    "ring-attention-pytorch",
    "dense, causal or not, contiguous order in shards of one length, buckets that divide them, fp32, head_dim ** -0.5 "
    "as scale, all ranks",
    partial(claimed, order="contiguous", causal=None),
)
striped = variant(
    "ring-attention-pytorch/striped",
    "dense causal, striped order in shards of one length, each one bucket, fp32, head_dim ** -0.5 as scale, all ranks",
    partial(claimed, order="striped", causal=True),
)
