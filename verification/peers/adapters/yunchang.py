"""feifeibear/long-context-attention (`yunchang`): USP, all-to-all over heads (Ulysses) times a ring, over flash_attn.

`flash_attn_shim` stands in for flash_attn. The all-to-all has the largest size that divides both the ranks and the
key/value heads and leaves a ring of at least two ranks: in a ring of one, a rank sends to itself, which gloo does not
support. zigzag and strip are the package's names for its other rings; with a larger all-to-all their shards are in an
order that no Case has, so they run as rings only.
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
from verification.peers.adapters.over_flash_attn import Ring, peer, window_size
from verification.peers.peer import Peer, Result

SUPPORTED = "bf16 and fp16, GQA, any scale, all ranks"


def prepare() -> None:
    flash_attn_shim.install()
    importlib.import_module("yunchang")


def all_to_all_ranks(case: Case) -> int:
    limit = math.gcd(case.world, case.kv_heads)
    return max(size for size in range(1, limit + 1) if limit % size == 0 and size < case.world)


@lru_cache(maxsize=64)
def groups(ulysses: int, world: int) -> tuple[Any, Any]:
    """Return the package's two process groups for that split. Collective. They are created once and never destroyed."""
    globals_ = importlib.import_module("yunchang.globals")
    globals_.set_seq_parallel_pg(ulysses, world // ulysses, dist.get_rank(), world)
    return globals_.PROCESS_GROUP.ULYSSES_PG, globals_.PROCESS_GROUP.RING_PG


def variant(name: str, ring: Ring) -> Peer:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        ulysses = all_to_all_ranks(case) if name == "basic" else 1
        process_group = importlib.import_module("yunchang.globals").PROCESS_GROUP
        process_group.ULYSSES_PG, process_group.RING_PG = groups(ulysses, case.world)
        attention: Any = importlib.import_module("yunchang").LongContextAttention(ring_impl_type=name)
        options = {"causal": case.pattern.causal, "window_size": window_size(case), "softmax_scale": case.scale}
        out: Tensor = attention(q, k, v, **options)
        return out

    return peer(f"yunchang/{name}", ring, SUPPORTED, claims.all_ranks, claims.without_lse, attend, prepare)


VARIANTS = {"basic": Ring(), "zigzag": Ring("zigzag", 2, causal=True), "strip": Ring("striped", causal=True)}
basic, zigzag, strip = (variant(*item) for item in VARIANTS.items())
