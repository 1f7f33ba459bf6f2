"""Settings to draw for plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from reference.documents import documents_from_cu_seqlens
from reference.pattern import Branch, Pattern
from ring.layout import Layout
from ring.plan.plan import EXCHANGES
from verification.run.plan_walk import Array, PlanSetting


def listed(layout: Layout) -> Layout:
    """The same layout as a listing, whatever it is kept as."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return Layout(layout.n, layout.cuts, None, order.numpy())


def rank_of_position(layout: Layout) -> Array:
    ranks = np.zeros(layout.n, np.int64)
    for rank in range(layout.world_size):
        ranks[layout.positions(rank).numpy()] = rank
    return ranks


@st.composite
def layouts(draw: Any, most_tokens: int = 28, worlds: tuple[int, ...] = (2, 3, 1, 4, 5, 6, 2, 3, 4, 16)) -> Layout:
    p, n = draw(st.sampled_from(worlds)), draw(st.integers(0, most_tokens))
    kinds = ("contiguous", "zigzag", "striped", "hilbert", "uneven", "runs", "shuffled", "runs", "runs")
    kind = draw(st.sampled_from(kinds))
    if kind in ("contiguous", "zigzag", "striped", "hilbert"):
        return getattr(Layout, kind)(n, p)
    order = list(range(n))
    if kind == "runs":  # of one step or of two, next to one another and interleaved
        middle, steps = draw(st.integers(0, n)), (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        runs = [range(r, middle, steps[0]) for r in range(steps[0])]
        runs += [range(middle + r, n, steps[1]) for r in range(steps[1])]
        if draw(st.booleans()):
            runs = [runs[0][::2], runs[0][1::2], *runs[1:]]
        order = [position for run in draw(st.permutations(runs)) for position in run]
    if kind == "shuffled":
        order = draw(st.permutations(order))
    return Layout.from_cuts(order, (0, *sorted(draw(st.integers(0, n)) for _ in range(p - 1)), n))


@st.composite
def patterns(draw: Any, heads: int, most_branches: int = 3) -> Pattern:
    branches = []
    for _ in range(draw(st.integers(1, most_branches))):
        rate = draw(st.sampled_from((1, 2, 3, 4, 5, 1, 2)))
        length = draw(st.sampled_from((None, 1, 2, 3, 4, 5, 7, 8, 12, 16, 64)))
        served, count = None, heads
        if draw(st.integers(0, 3)) == 3:
            first = draw(st.integers(0, heads - 1))
            served = range(first, draw(st.integers(first + 1, heads)))
            count = len(served)
        offset = st.integers(0, rate - 1)
        per_head = draw(st.booleans())
        window = draw(st.sampled_from((None, None, 0, 1, 2, 3, 5, 6, 9, 20)))
        branches.append(
            Branch(
                length, rate, tuple(draw(offset) for _ in range(count)) if per_head else draw(offset), served, window
            )
        )
    return Pattern(tuple(branches), draw(st.booleans()))


@st.composite
def documents(draw: Any, tokens: int) -> tuple[int, ...] | None:
    """In half of the draws none; some are empty, or hold one token."""
    if draw(st.booleans()):
        return None
    edges = draw(st.lists(st.integers(0, tokens), max_size=6))
    edges += [min(edge + 1, tokens) for edge in edges[::2]]
    return documents_from_cu_seqlens([0, *sorted(edges), tokens], tokens)


@st.composite
def drawn_settings(draw: Any) -> PlanSetting:
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3)))
    pattern, layout = draw(patterns(heads)), draw(layouts())
    return PlanSetting(
        replace(pattern, documents=draw(documents(layout.n))),
        layout,
        heads,
        kv_heads,
        draw(st.sampled_from(EXCHANGES)),
        draw(st.sampled_from((1, 2, 3, 5, 8, 1000))),
        draw(st.sampled_from((0, 0, 1, 2, 4, 1000))),
    )
