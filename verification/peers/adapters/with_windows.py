"""The rings over flash_attn that take `window_size` and claim no windows, with windows: what they make of it.

They pass the argument to every kernel call, and a call takes its queries and keys for the last ones of one sequence. So
the window is applied to each pair of shards as if they lay side by side. These are no known peers, whose records have
what is claimed; a run names them:

    scripts/peers verification.peers.adapters.with_windows:ring
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters import ring_flash_attn, ring_flash_attn_varlen, yunchang
from verification.peers.adapters.over_flash_attn import Ring
from verification.peers.peer import Peer


def with_a_window(case: Case) -> Case:
    """The Case, if one of its branches has a window; else with one of a quarter of the tokens."""
    if claims.window(case) is not None:
        return case
    branches = tuple(replace(branch, window=case.tokens // 4) for branch in case.pattern.branches)
    return replace(case, pattern=replace(case.pattern, branches=branches))


def windowed(adapter: ModuleType, variant: str, causal: bool | None = None) -> Peer:
    """The adapter's variant, with windows for all values of causal that it takes. causal: None as the ring has it."""
    ring: Ring = adapter.VARIANTS[variant]
    causal = ring.causal if causal is None else causal
    ring = replace(ring, causal=causal, windows=(False, True) if causal is None else (causal,))
    peer: Peer = adapter.variant(variant, ring)
    return replace(peer, name=f"{peer.name} with windows", claims=lambda case: peer.claims(with_a_window(case)))


ring, zigzag, stripe = (windowed(ring_flash_attn, name) for name in ring_flash_attn.VARIANTS)
llama3_varlen = windowed(ring_flash_attn_varlen, "llama3_flash_attn_varlen", causal=False)
ring_varlen = windowed(ring_flash_attn_varlen, "ring_flash_attn_varlen")
zigzag_varlen = windowed(ring_flash_attn_varlen, "zigzag_ring_flash_attn_varlen")
yunchang_basic, yunchang_zigzag, yunchang_strip = (windowed(yunchang, name) for name in yunchang.VARIANTS)
