"""This project's attention without `same_bits`, by each exchange: whose results have the same bits on any ranks?

By heads, each rank computes whole heads as one rank does, over a kernel of a fixed order. By keys, a row's parts and
their order depend on the ranks. None is among the known peers; each runs by `verification.peers.adapters.own:by_heads`.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from reference.fast_oracle import QUANTITIES
from ring import ring_attention
from verification.case import Case
from verification.peers import claims
from verification.peers.peer import Peer, Result
from verification.run.layouts import layout_of


def claimed(exchange: str, case: Case) -> Case:
    case = claims.dense(claims.all_ranks(claims.without_own_settings(case)), True)
    case = dataclasses.replace(case, order=case.order if case.order == "zigzag" else "contiguous", exchange=exchange)
    return claims.divisible_heads(case, case.world) if exchange == "all-to-all" else case


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup | None) -> Result:
    return ring_attention(
        q, k, v, case.pattern, layout_of(case), group=group, exchange=case.exchange, kernel=case.kernel,
        scale=case.scale, return_lse=case.lse != "unused",
    )  # fmt: skip


def peer(exchange: str, same_bits: tuple[str, ...] = ()) -> Peer:
    supported = "dense causal attention, contiguous and zigzag, all ranks, every dtype"
    return Peer(f"ring/{exchange}", supported, partial(claimed, exchange), attend, (1, 2, 3, 4), same_bits=same_bits)


by_heads, by_ring, directly, gathered = peer("all-to-all", QUANTITIES), peer("ring"), peer("direct"), peer("gather")
