"""DeepSpeed's Ulysses (`deepspeed`): all-to-all over heads around an attention of the whole sequence.

    ulysses   `deepspeed.sequence.layer.DistributedAttention` around `flash_attn_shim.attention`. The seed determines
              whether the batch or the sequence is the first dimension. Key/value heads need not divide by the ranks:
              each rank then has whole groups of heads
    alst      `UlyssesSPAttentionHF`, which it registers with transformers, around transformers' `sdpa`. Key/value heads
              divide by the ranks, or the ranks by them. The seed determines whether lengths may vary between calls

The package finds its group by its own mesh, which is made as its engine makes it. On CPUs torch's
`scaled_dot_product_attention` is nan for a causal mask with a scale of zero or less, so alst claims positive ones.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import os
import warnings
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters.flash_attn_shim import attention
from verification.peers.peer import Attend, Peer, Result

LAYER, ALST = "deepspeed.sequence.layer", "deepspeed.runtime.sequence_parallel.ulysses_sp"
SDPA = "transformers.integrations.sdpa_attention"


def prepare() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it once, when imported
    for module in (LAYER, ALST, SDPA):
        importlib.import_module(module)
    importlib.import_module("ring.integrations.deepspeed").without_compiler()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)


@lru_cache(maxsize=8)
def make_mesh(world: int) -> None:
    """Initialise the package's communication and mesh for that world. Collective."""
    comm: Any = importlib.import_module("deepspeed.comm")
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    groups.mesh_device = comm.initialize_mesh_device((1, world), ("data_parallel", "sequence_parallel"))


def claimed(case: Case, name: str) -> Case:
    case = claims.dense(claims.all_ranks(claims.without_own_settings(case)))
    case = claims.without_lse(claims.even_shards(case, "contiguous"))
    ranks, kv_heads = case.world, case.kv_heads
    if name == "ulysses":
        kv_heads = max(kv_heads, ranks)
        return dataclasses.replace(case, kv_heads=kv_heads, heads=kv_heads * (case.heads // case.kv_heads))
    if kv_heads % ranks and ranks % kv_heads:
        kv_heads = -(-kv_heads // ranks) * ranks
    unit = math.lcm(kv_heads, ranks)
    return claims.positive_scale(dataclasses.replace(case, kv_heads=kv_heads, heads=-(-case.heads // unit) * unit))


def attend_ulysses(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    batch_first = case.seed % 2 == 0

    def swapped(x: Tensor) -> Tensor:
        return x if batch_first else x.transpose(0, 1)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return swapped(attention(swapped(q), swapped(k), swapped(v), case.softmax_scale, case.pattern.causal)[0])

    make_mesh(case.world)
    module = importlib.import_module(LAYER).DistributedAttention(whole, group, 2, 1 if batch_first else 0)
    out: Tensor = module(*map(swapped, (q, k, v)), batch_dim_idx=0 if batch_first else 1)
    return swapped(out)


def attend_alst(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    make_mesh(case.world)
    length = q.shape[1]
    variable = case.seed % 2 == 0
    lengths: dict[str, Any] = {} if variable else {"local_seq_length": length, "global_seq_length": case.tokens}
    ulysses = importlib.import_module(ALST).UlyssesSPAttentionHF(
        importlib.import_module(SDPA).sdpa_attention_forward, case.batch, case.heads, case.head_dim, case.kv_heads, 1,
        group, seq_length_is_variable=variable, **lengths,
    )  # fmt: skip
    layer: Any = nn.Module()
    layer.num_key_value_groups = case.heads // case.kv_heads
    assert group is not None
    start = group.rank() * length
    positions = torch.arange(start, start + length).expand(case.batch, -1).contiguous()
    out: Tensor = ulysses(
        layer, *(x.transpose(1, 2) for x in (q, k, v)), None, scaling=case.scale, is_causal=case.pattern.causal,
        position_ids=positions,
    )[0]  # fmt: skip
    return out.unflatten(2, (case.heads, case.head_dim))


def variant(name: str, heads: str, scale: str, attend: Attend, arithmetic: str) -> Peer:
    supported = f"causal or not, contiguous order in shards of one length, GQA with {heads}, {scale} scale, all ranks"
    return Peer(
        f"deepspeed/{name}", f"{supported}, fp32, fp64, bf16, fp16", partial(claimed, name=name), attend,
        package="deepspeed", arithmetic=arithmetic, prepare=prepare,
    )  # fmt: skip


ulysses = variant("ulysses", "a key/value head for each rank or more", "any", attend_ulysses, "math")
alst = variant("alst", "key/value heads that the ranks divide, or divide the ranks", "positive", attend_alst, "half")
