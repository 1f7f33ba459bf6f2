"""feifeibear/long-context-attention (`yunchang`): USP, all-to-all over heads (Ulysses) times a ring, over flash_attn.

Its logic over a stand-in for flash_attn. The Case decides how many of its ranks are joined by all-to-all: as many as
divide both the ranks and the key/value heads, and leave a ring of two ranks or more, since a ring of one sends to
itself, which NCCL can and gloo cannot. zigzag and strip are the package's names for its other rings; with more than one
rank in the all-to-all their shards are an order of the tokens that no Case has, so they are run as rings only.
"""

from __future__ import annotations

import importlib
import math
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters import flash_attn_shim
from verification.peers.peer import Peer, Result

WORDS = "bf16 and fp16, GQA, any scale, all ranks"
ORDERS = {"basic": ("contiguous", 1, None), "zigzag": ("zigzag", 2, True), "strip": ("striped", 1, True)}


def prepare() -> None:
    flash_attn_shim.install()
    importlib.import_module("yunchang")


def claimed(case: Case, order: str, chunks: int, causal: bool | None) -> Case:
    case = claims.even(claims.dense(claims.everyone(claims.settled(case)), causal), order, chunks)
    return claims.without_lse(claims.in_dtypes(case, "float16", "bfloat16"))


def joined(case: Case) -> int:
    """Ranks in an all-to-all."""
    most = math.gcd(case.world, case.kv_heads)
    return max(size for size in range(1, most + 1) if most % size == 0 and size < case.world)


@lru_cache(maxsize=64)
def groups(ulysses: int, world: int) -> tuple[Any, Any]:
    """The package's own two groups for that split, made by all ranks, once: they are never given back."""
    globals_ = importlib.import_module("yunchang.globals")
    globals_.set_seq_parallel_pg(ulysses, world // ulysses, dist.get_rank(), world)
    return globals_.PROCESS_GROUP.ULYSSES_PG, globals_.PROCESS_GROUP.RING_PG


def variant(ring: str) -> Peer:
    order, chunks, causal = ORDERS[ring]

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        ulysses = joined(case) if ring == "basic" else 1
        chosen = importlib.import_module("yunchang.globals").PROCESS_GROUP
        chosen.ULYSSES_PG, chosen.RING_PG = groups(ulysses, case.world)
        attention: Any = importlib.import_module("yunchang").LongContextAttention(ring_impl_type=ring)
        out: Tensor = attention(q, k, v, causal=case.pattern.causal, softmax_scale=case.scale)
        return out

    masks = "dense causal" if causal else "dense, causal or not"
    return Peer(
        name=f"yunchang/{ring}",
        package="yunchang",
        supported=f"{masks}, {order} order in shards of one length, {WORDS}",
        claims=lambda case: claimed(case, order, chunks, causal),
        attend=attend,
        arithmetic="half",
        merge="interpolated",
        prepare=prepare,
    )


basic, zigzag, strip = (variant(ring) for ring in ORDERS)
