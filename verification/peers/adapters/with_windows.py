"""The rings over flash_attn that take `window_size` and claim no windows, with windows: what they make of it.

They pass the argument to every kernel call, and a call takes its queries and keys for the last ones of one sequence. So
the window is applied to each pair of shards as if they lay side by side. These are no known peers, whose records have
what is claimed; a run names them:

    scripts/peers verification.peers.adapters.with_windows:ring
"""

from __future__ import annotations

from dataclasses import replace

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters import ring_flash_attn, ring_flash_attn_varlen, yunchang
from verification.peers.adapters.over_flash_attn import Ring
from verification.peers.peer import Peer


def windowed(ring: Ring, causal: bool | None = None) -> Ring:
    """causal: None as the ring has it."""
    causal = ring.causal if causal is None else causal
    return replace(ring, causal=causal, windows=(False, True) if causal is None else (causal,))


def with_a_window(case: Case) -> Case:
    """The Case, if one of its branches has a window; else with one of a quarter of the tokens."""
    if claims.window(case) is not None:
        return case
    branches = tuple(replace(branch, window=case.tokens // 4) for branch in case.pattern.branches)
    return replace(case, pattern=replace(case.pattern, branches=branches))


def _named(peer: Peer) -> Peer:
    return replace(peer, name=f"{peer.name} with windows", claims=lambda case: peer.claims(with_a_window(case)))


def _of(module: str) -> Peer:
    return _named(ring_flash_attn.variant(module, windowed(ring_flash_attn.VARIANTS[module])))


def _varlen(module: str, causal: bool | None = None) -> Peer:
    return _named(ring_flash_attn_varlen.variant(module, windowed(ring_flash_attn_varlen.VARIANTS[module], causal)))


def _yunchang(name: str) -> Peer:
    return _named(yunchang.variant(name, windowed(yunchang.VARIANTS[name])))


ring, zigzag, stripe = (_of(module) for module in ring_flash_attn.VARIANTS)
llama3_varlen = _varlen("llama3_flash_attn_varlen", causal=False)
ring_varlen, zigzag_varlen = _varlen("ring_flash_attn_varlen"), _varlen("zigzag_ring_flash_attn_varlen")
yunchang_basic, yunchang_zigzag, yunchang_strip = (_yunchang(name) for name in yunchang.VARIANTS)
