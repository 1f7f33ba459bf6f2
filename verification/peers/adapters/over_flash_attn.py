"""Common parts of the peers over flash_attn: 16 bits, dense patterns, shards of equal length.

All their functions pass flash_attn's `window_size` to every kernel call, which assumes that its queries and keys end
together. They do so in llama3's causal calls, so only these claim windows; `with_windows` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from verification.case import ORDERS_BY_DOCUMENT, Case
from verification.peers import claims
from verification.peers.peer import Attend, Peer

Step = Callable[[Case], Case]


@dataclass(frozen=True)
class Ring:
    """One ring. order: of its tokens. chunks: per shard. causal: None allows both. packed: True if it takes one
    sequence packed from documents instead of a batch. merge: as for a Peer. windows: values of causal with which it
    supports a window."""

    order: str = "contiguous"
    chunks: int = 1
    causal: bool | None = None
    packed: bool = False
    merge: str = "interpolated"
    windows: tuple[bool, ...] = ()

    def claimed(self, case: Case) -> Case:
        """Return the nearest Case that the ring supports."""
        causal = case.pattern.causal if self.causal is None else self.causal
        to_dense = claims.packed if self.packed else claims.dense
        case = to_dense(claims.without_own_settings(case), causal, windows=causal in self.windows)
        case = replace(case, batch=1 if self.packed else case.batch)
        divided = claims.even_parts if self.order in ORDERS_BY_DOCUMENT else claims.even_shards
        return claims.in_dtypes(divided(case, self.order, self.chunks), "float16", "bfloat16")

    @property
    def supported(self) -> str:
        masks = {True: "dense causal", False: "dense, not causal", None: "dense, causal or not"}[self.causal]
        within = ", within documents of one sequence" if self.packed else ""
        unit = "the ranks" if self.chunks == 1 else f"{self.chunks} times the ranks"
        lengths = f", lengths of documents that divide by {unit}" if self.order in ORDERS_BY_DOCUMENT else ""
        windowed = ", with windows if causal" if self.windows == (True,) and self.causal is None else ", with windows"
        windows = windowed if self.windows else ""
        return f"{masks}{windows}{within}, {self.order} order in shards of one length{lengths}"


def window_size(case: Case) -> tuple[int, int]:
    """The window as flash_attn takes it: (left, right), -1 for no limit. If causal, it ignores right."""
    window = claims.window(case)
    return (-1, -1) if window is None else (window, window)


def peer(
    name: str, ring: Ring, supported: str, ranks: Step, lse: Step, attend: Attend, prepare: Callable[[], object]
) -> Peer:
    """Return a Peer. name: package/ring. supported: the claim beyond the ring's own. ranks, lse: parts of the claim."""
    return Peer(
        name, f"{ring.supported}, {supported}", lambda case: lse(ring.claimed(ranks(case))), attend,
        package=name.partition("/")[0], arithmetic="half", merge=ring.merge, prepare=prepare,
    )  # fmt: skip
