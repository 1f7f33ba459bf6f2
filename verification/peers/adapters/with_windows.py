"""Rings over flash_attn that accept `window_size` but claim no windows, run with windows.

They pass the argument to every kernel call, which assumes that its queries and keys end together. So the window is
applied to each pair of shards as if they were adjacent. They are not known peers, whose records cover claims only, so
a run must name them:

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
    """Return the Case if it has a window; otherwise add one of a quarter of the tokens."""
    if claims.window(case) is not None:
        return case
    branches = tuple(replace(branch, window=case.tokens // 4) for branch in case.pattern.branches)
    return replace(case, pattern=replace(case.pattern, branches=branches))


def windowed(adapter: ModuleType, variant: str, causal: bool | None = None) -> Peer:
    """Return the adapter's variant with windows for all its values of causal. causal: None keeps the ring's."""
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
