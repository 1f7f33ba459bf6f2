"""The functions of `ring-flash-attn` for one sequence packed from documents, over the stand-in for flash_attn.

ring, zigzag: every document is divided among the ranks by itself. The package neither checks nor documents lengths; its
own tests use multiples of the number of ranks, for zigzag of twice that, and so does the claim.

llama3: contiguous shards of equal length, documents of any length. All keys and values are gathered, some heads at a
time, and each rank makes one kernel call for its documents, so nothing is merged. The seed determines how many
key/value heads are gathered at a time, from one to all. If causal, keys end with the queries, as the kernel assumes, so
a window is right; otherwise keys after the queries shift it.
"""

from __future__ import annotations

import importlib
import math
import warnings
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters.over_flash_attn import Ring, peer
from verification.peers.adapters.ring_flash_attn import PACKAGE, SUPPORTED, call, import_modules
from verification.peers.peer import Peer, Result


def prepare() -> None:
    import_modules(VARIANTS)
    # llama3 calls collectives by names that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)


def lengths(case: Case, parts: int = 1) -> tuple[Tensor, int]:
    """Return (boundaries of documents (documents + 1,) int32, longest length), both divided by `parts`."""
    documents = case.pattern.documents or (case.tokens,)
    edges = torch.tensor(list(accumulate(documents, initial=0)), dtype=torch.int32)
    return edges // parts, max(documents) // parts


def document_lengths(case: Case, group: ProcessGroup | None) -> dict[str, Any]:
    """Length arguments of ring and zigzag: the rank's share of each document."""
    edges, longest = lengths(case, len(case.ranks))
    return {"cu_seqlens": edges, "max_seqlen": longest}


def llama3_lengths(case: Case, group: ProcessGroup | None) -> dict[str, Any]:
    """Length arguments of llama3: for a rank's queries, and for the keys that they attend to."""
    module = importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")
    values = module.llama3_flash_attn_prepare_cu_seqlens(
        lengths(case)[0], case.pattern.causal, dist.get_rank(group), dist.get_world_size(group)
    )
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    return dict(zip(names, values, strict=True)) | {"heads_k_stride": math.gcd(case.seed, case.kv_heads)}


def variant(module: str, ring: Ring) -> Peer:
    lengths_of = document_lengths if ring.order.endswith("by document") else llama3_lengths

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        out, lse = call(module, (q[0], k[0], v[0]), case, group=group, **lengths_of(case, group))
        return out[None], lse[None]

    name = f"ring-flash-attn/{module.partition('_')[0]}-varlen"
    return peer(name, ring, SUPPORTED, claims.two_ranks_or_more, claims.lse_returned, attend, prepare)


VARIANTS = {
    "llama3_flash_attn_varlen": Ring(packed=True, merge="weighted", windows=(True,)),
    "ring_flash_attn_varlen": Ring("contiguous by document", packed=True),
    "zigzag_ring_flash_attn_varlen": Ring("zigzag by document", 2, causal=True, packed=True),
}
llama3, ring, zigzag = (variant(*item) for item in VARIANTS.items())
