"""What the peers over flash_attn have in common: 16 bits, dense patterns, shards of one length.

All their functions take flash_attn's `window_size` and pass it to every kernel call, which takes its queries and keys
to end together. In llama3's causal calls they do, and so these alone claim windows; `with_windows` has the others.
"""

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
    whether it takes one sequence, packed from documents, instead of a batch. merge: as a Peer has it. windows: the
    values of causal with which it takes a window."""

    order: str = "contiguous"
    chunks: int = 1
    causal: bool | None = None
    packed: bool = False
    merge: str = "interpolated"
    windows: tuple[bool, ...] = ()

    def claimed(self, case: Case) -> Case:
        causal = case.pattern.causal if self.causal is None else self.causal
        plain = claims.packed if self.packed else claims.dense
        case = plain(claims.without_own_settings(case), causal, windows=causal in self.windows)
        divided = claims.even_parts if self.order in ORDERS_BY_DOCUMENT else claims.even_shards
        return claims.in_dtypes(divided(case, self.order, self.chunks), "float16", "bfloat16")

    @property
    def words(self) -> str:
        masks = {True: "dense causal", False: "dense, not causal", None: "dense, causal or not"}[self.causal]
        within = ", within documents of one sequence" if self.packed else ""
        unit = "the ranks" if self.chunks == 1 else f"{self.chunks} times the ranks"
        whole = f", lengths of documents that divide by {unit}" if self.order in ORDERS_BY_DOCUMENT else ""
        taken = ", with windows if causal" if self.windows == (True,) and self.causal is None else ", with windows"
        windows = taken if self.windows else ""
        return f"{masks}{windows}{within}, {self.order} order in shards of one length{whole}"


def window_size(case: Case) -> tuple[int, int]:
    """As flash_attn has it: positions before and behind, -1 for all. If causal, it looks at the first alone."""
    window = claims.window(case)
    return (-1, -1) if window is None else (window, window)


def peer(
    name: str, ring: Ring, words: str, ranks: Step, lse: Step, attend: Attend, prepare: Callable[[], object]
) -> Peer:
    """name: package/ring. words: what it supports beside its ring's order. ranks, lse: steps of its claim."""
    return Peer(
        name, f"{ring.words}, {words}", lambda case: lse(ring.claimed(ranks(case))), attend,
        package=name.partition("/")[0], arithmetic="half", merge=ring.merge, prepare=prepare,
    )  # fmt: skip
