"""What the peers over flash_attn have in common: 16 bits, dense patterns, shards of one length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verification.case import ORDERS_BY_DOCUMENT, Case
from verification.peers import claims
from verification.peers.peer import Attend, Peer

Step = Callable[[Case], Case]


@dataclass(frozen=True)
class Ring:
    """One ring: the order of its tokens, the chunks of a shard, whether it is always causal (None: as asked), and
    whether it takes one sequence, packed from documents, instead of a batch. merge: as a Peer has it."""

    order: str = "contiguous"
    chunks: int = 1
    causal: bool | None = None
    packed: bool = False
    merge: str = "interpolated"

    def claimed(self, case: Case) -> Case:
        case = (claims.packed if self.packed else claims.dense)(claims.without_own_settings(case), self.causal)
        divided = claims.even_parts if self.order in ORDERS_BY_DOCUMENT else claims.even_shards
        return claims.in_dtypes(divided(case, self.order, self.chunks), "float16", "bfloat16")

    @property
    def words(self) -> str:
        masks = "dense causal" if self.causal else "dense, causal or not"
        within = ", within documents of one sequence" if self.packed else ""
        unit = "the ranks" if self.chunks == 1 else f"{self.chunks} times the ranks"
        whole = f", lengths of documents that divide by {unit}" if self.order in ORDERS_BY_DOCUMENT else ""
        return f"{masks}{within}, {self.order} order in shards of one length{whole}"


def peer(
    name: str,
    ring: Ring,
    words: str,
    ranks: Step,
    lse: Step,
    attend: Attend,
    prepare: Callable[[], None],
) -> Peer:
    """name: package/ring. words: what it supports beside its ring's order. ranks, lse: steps of its claim."""
    return Peer(
        name=name,
        package=name.partition("/")[0],
        supported=f"{ring.words}, {words}",
        claims=lambda case: lse(ring.claimed(ranks(case))),
        attend=attend,
        arithmetic="half",
        merge=ring.merge,
        prepare=prepare,
    )
