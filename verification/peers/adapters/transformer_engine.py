"""TransformerEngine's context-parallel attention, on cuDNN or FlashAttention: each of its `cp_comm_type`.

    p2p         a ring of keys and values, whose partial results are corrected by exp(lse of the step - lse)
    all_gather  keys and values of all ranks
    a2a         all-to-all over heads
    a2a+p2p     all-to-all within pairs of ranks, a ring between them

    python -m verification peers --backend nccl --world 2 verification.peers.adapters.transformer_engine:p2p

They are run by name, since they need GPUs and a build for them: pip install --no-build-isolation
"transformer-engine[pytorch]". Causal ones have its dual-chunk order, which is zigzag. Written for 2.20.2, and not run.
The formula of p2p runs on CPUs: `formulas`.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters.gpu_kernels import COMPILES, on_gpu
from verification.peers.peer import Peer

A2A_RANKS = 2  # of each pair in a2a+p2p


def prepare() -> None:
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # read when attention is called
    importlib.import_module("transformer_engine.pytorch")
    on_gpu()


def claimed(case: Case, way: str) -> Case:
    case = claims.dense(claims.all_ranks(claims.without_own_settings(case)))
    case = claims.even_shards(case, "zigzag" if case.pattern.causal else "contiguous", 2)
    case = claims.of_sizes(case, tokens=(), head_dims=(64, 128))
    if "a2a" in way:
        case = claims.divisible_heads(case, A2A_RANKS if "p2p" in way else case.world)
    return claims.positive_scale(claims.without_lse(claims.in_dtypes(case, "bfloat16", "float16")))


@lru_cache(maxsize=8)
def pairs(world: int) -> list[ProcessGroup]:
    """Return this rank's groups for all-to-all and for the ring. Collective. They are created once, never destroyed."""
    mesh = init_device_mesh("cuda", (world // A2A_RANKS, A2A_RANKS), mesh_dim_names=("p2p", "a2a"))
    return [mesh["a2a"].get_group(), mesh["p2p"].get_group()]


@lru_cache(maxsize=1)
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup, *, way: str) -> Tensor:
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    module = engine.DotProductAttention(
        case.heads, case.head_dim, num_gqa_groups=case.kv_heads, qkv_format="bshd",
        attn_mask_type="causal" if case.pattern.causal else "no_mask", softmax_scale=case.softmax_scale,
    )  # fmt: skip
    groups = pairs(case.world) if way == "a2a+p2p" else group
    module.set_context_parallel_group(groups, dist.get_process_group_ranks(group), stream(), cp_comm_type=way)
    out: Tensor = module(q, k, v)  # (B, L, H * D)
    return out.view(q.shape)


def variant(way: str) -> Peer:
    heads = "" if "a2a" not in way else ", heads that divide by the ranks of an all-to-all"
    return Peer(
        f"transformer-engine/{way}", f"dense, zigzag if causal, shards of one length, fp16, bf16{heads}",
        partial(claimed, way=way), partial(attend, way=way), worlds=(4,) if way == "a2a+p2p" else (2, 4),
        package="transformer-engine", arithmetic="gpu", prepare=prepare, timeout=COMPILES,
    )  # fmt: skip


p2p, all_gather, a2a, a2a_p2p = map(variant, ("p2p", "all_gather", "a2a", "a2a+p2p"))
