"""What implementations of a ring over flash_attn have in common: 16 bits, dense patterns, shards of one length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.peer import Peer, Result

Step = Callable[[Case], Case]


@dataclass(frozen=True)
class Ring:
    """Of one ring: the order of its tokens, how many chunks a shard has, and causal: always (True), or as asked."""

    order: str = "contiguous"
    chunks: int = 1
    causal: bool | None = None

    def claimed(self, case: Case) -> Case:
        case = claims.even(claims.dense(claims.settled(case), self.causal), self.order, self.chunks)
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
    attend: Callable[[Tensor, Tensor, Tensor, Case, ProcessGroup | None], Result],
    prepare: Callable[[], None],
) -> Peer:
    """name: its package's, "/", and its own. words: what it claims beside its ring. ranks, lse: steps of its claim."""
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
