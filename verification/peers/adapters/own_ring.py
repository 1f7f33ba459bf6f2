"""This project's `ring_attention` as a peer, in plain matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from reference.fast_oracle import QUANTITIES
from ring import ring_attention
from verification.case import Case
from verification.peers import claims
from verification.peers.peer import Peer, Result
from verification.run.layouts import key_layout_of, layout_of


@claims.takes(*claims.TAKEN)
def claimed(case: Case) -> Case:
    case = replace(case.for_any_ranks(), kernel="math")
    return case if case.same_bits is None else case.for_same_bits()


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: Any, sinks: Tensor | None = None) -> Result:
    keys = None if case.keys is None else key_layout_of(case)
    return ring_attention(
        q, k, v, case.pattern, layout_of(case), key_layout=keys, group=group, exchange=case.exchange,
        bucket=case.bucket, kernel="math", scale=case.scale, softcap=case.softcap, sinks=sinks,
        return_lse=case.lse != "unused", same_bits=case.same_bits,
    )  # fmt: skip


supported = "any mask, layout, dtype, exchange, sinks, softcap and keys of another sequence, by the kernel math"
adapter = Peer("ring", supported, claimed, attend, (1, 2, 3, 4), same_bits=QUANTITIES)
