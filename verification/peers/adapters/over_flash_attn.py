"""What the peers with a ring over flash_attn have in common: 16 bits, dense patterns, shards of one length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verification.case import Case
from verification.peers import claims
from verification.peers.peer import Attend, Peer

Step = Callable[[Case], Case]


@dataclass(frozen=True)
class Ring:
    """One ring: the order of its tokens, the chunks of a shard, and whether it is always causal (None: as asked)."""

    order: str = "contiguous"
    chunks: int = 1
    causal: bool | None = None

    def claimed(self, case: Case) -> Case:
        case = claims.even_shards(claims.dense(claims.without_own_settings(case), self.causal), self.order, self.chunks)
        return claims.in_dtypes(case, "float16", "bfloat16")

    @property
    def words(self) -> str:
        masks = "dense causal" if self.causal else "dense, causal or not"
        return f"{masks}, {self.order} order in shards of one length"


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
        merge="interpolated",
        prepare=prepare,
    )
