"""The functions of `ring-flash-attn` for one sequence that is packed from documents, over the stand-in for flash_attn.

ring, zigzag: every document is divided among the ranks by itself. The package checks no lengths, and says of none what
it takes; its own tests have lengths that divide by the number of ranks, for zigzag by twice that, and so has the claim.

llama3: contiguous shards of one length, documents of any length. All keys and values are gathered, some heads at a
time, and each rank makes one kernel call for those of the documents that it has a part of: nothing is merged. How many
key/value heads are gathered at a time follows from the seed, from one to all. If causal, its keys end with its queries,
as the kernel takes them to, so a window is one; else keys behind its queries shift the window.
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
from verification.peers.adapters.ring_flash_attn import PACKAGE, WORDS, call, import_modules
from verification.peers.peer import Peer, Result


def prepare() -> None:
    import_modules(VARIANTS)
    # llama3 calls collectives by names that torch 2.13 says are old, on every rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)


def lengths(case: Case, parts: int = 1) -> tuple[Tensor, int]:
    """(edges of the documents (documents + 1,) int32, the longest length), of a part of each document."""
    documents = case.pattern.documents or (case.tokens,)
    edges = torch.tensor(list(accumulate(documents, initial=0)), dtype=torch.int32)
    return edges // parts, max(documents) // parts


def of_each_document(case: Case, group: ProcessGroup | None) -> dict[str, Any]:
    """What the ring and zigzag ask: the lengths of what a rank has of the documents."""
    edges, longest = lengths(case, len(case.ranks))
    return {"cu_seqlens": edges, "max_seqlen": longest}


def of_contiguous_shards(case: Case, group: ProcessGroup | None) -> dict[str, Any]:
    """What llama3 asks: the lengths of a rank's queries, and of the keys that these see."""
    module = importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")
    found = module.llama3_flash_attn_prepare_cu_seqlens(
        lengths(case)[0], case.pattern.causal, dist.get_rank(group), dist.get_world_size(group)
    )
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    return dict(zip(names, found, strict=True)) | {"heads_k_stride": math.gcd(case.seed, case.kv_heads)}


def variant(module: str, ring: Ring) -> Peer:
    asked = of_each_document if ring.order.endswith("by document") else of_contiguous_shards

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
        out, lse = call(module, (q[0], k[0], v[0]), case, group=group, **asked(case, group))
        return out[None], lse[None]

    name = f"ring-flash-attn/{module.partition('_')[0]}-varlen"
    return peer(name, ring, WORDS, claims.two_ranks_or_more, claims.lse_returned, attend, prepare)


VARIANTS = {
    "llama3_flash_attn_varlen": Ring(packed=True, merge="weighted", windows=(True,)),
    "ring_flash_attn_varlen": Ring("contiguous by document", packed=True),
    "zigzag_ring_flash_attn_varlen": Ring("zigzag by document", 2, causal=True, packed=True),
}
llama3, ring, zigzag = (variant(*item) for item in VARIANTS.items())
