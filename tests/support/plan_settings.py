"""Settings to draw for plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from reference.documents import documents_from_cu_seqlens
from reference.pattern import Branch, Pattern
from reference.slices import CAUSAL, EVERYTHING, Slice, meet
from ring.layout import Layout
from ring.plan.exchanges import KEY_EXCHANGES
from tests.ring.plan.plan_walk import PlanSetting

# Slices of whole sequences: all that blocks treat as patterns without slices, and such as look alike.
WHOLE = (CAUSAL, EVERYTHING, Slice(low=-3, high=0), Slice(low=-3, high=1), Slice(low=-3, high=3), Slice(low=-3))


def listed(layout: Layout) -> Layout:
    """The same layout as a listing, whatever it is kept as."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return Layout(layout.n, layout.cuts, None, order.numpy())


@st.composite
def layouts(draw: Any, most_tokens: int = 28, worlds: tuple[int, ...] = (2, 3, 1, 4, 5, 6, 2, 3, 4, 16)) -> Layout:
    p, n = draw(st.sampled_from(worlds)), draw(st.integers(0, most_tokens))
    named = ("contiguous", "zigzag", "striped", "hilbert")
    kind = draw(st.sampled_from((*named, "uneven", "shuffled", "runs", "runs", "runs")))
    if kind in named:
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
        one = st.integers(0, rate - 1)
        offset = tuple(draw(one) for _ in range(count)) if draw(st.booleans()) else draw(one)
        window = draw(st.sampled_from((None, None, 0, 1, 2, 3, 5, 6, 9, 20)))
        branches.append(Branch(length, rate, offset, served, window))
    return Pattern(tuple(branches), draw(st.booleans()))


@st.composite
def with_slices(draw: Any, pattern: Pattern, n: int, keys: int | None = None) -> Pattern:
    """Give some branches up to five disjoint slices with any ends and bounds, of n queries and (None) as many keys."""
    place, key = st.integers(0, n), st.integers(0, n if keys is None else keys)
    ends, bounds = st.tuples(place, place, key, key), st.none() | st.integers(-n, n)
    branches = []
    for branch in pattern.branches:
        slices = [draw(st.sampled_from(WHOLE))] if draw(st.booleans()) else []
        for (a, b, c, d), low, high in draw(st.lists(st.tuples(ends, bounds, bounds), max_size=4)):
            one = Slice(min(a, b), max(a, b), min(c, d), max(c, d), low, high)
            slices += [] if any(meet(one, other) for other in slices) else [one]
        branches.append(replace(branch, slices=tuple(slices)) if draw(st.integers(0, 3)) else branch)
    return replace(pattern, branches=tuple(branches))


@st.composite
def documents(draw: Any, tokens: int) -> tuple[int, ...] | None:
    """In half of the draws none; else some are empty or hold one token, or all are short and of few lengths."""
    kind = draw(st.sampled_from((None, None, "any", "short")))
    if kind is None:
        return None
    if kind == "any":
        edges = draw(st.lists(st.integers(0, tokens), max_size=6))
        edges += [min(edge + 1, tokens) for edge in edges[::2]]
    else:
        lengths = draw(st.lists(st.integers(1, 4), min_size=tokens, max_size=tokens))
        edges = [edge for edge in accumulate(lengths) if edge < tokens]
    return documents_from_cu_seqlens([0, *sorted(edges), tokens], tokens)


# Heads of one offset that are no regular rectangle need several key/value heads with several query heads each.
HEADS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (9, 3))


@st.composite
def drawn_settings(draw: Any) -> PlanSetting:
    heads, kv_heads = draw(st.sampled_from(HEADS))
    pattern, layout = draw(patterns(heads)), draw(layouts())
    if draw(st.booleans()):
        pattern = draw(with_slices(pattern, layout.n))
    bucket, more = draw(st.sampled_from((1, 2, 3, 5, 8, 1000))), draw(st.sampled_from((None, None, 0, 5, 64)))
    return PlanSetting(
        replace(pattern, documents=draw(documents(layout.n))), layout, heads, kv_heads,
        exchange=draw(st.sampled_from([*KEY_EXCHANGES])), bucket=bucket,
        varlen=draw(st.sampled_from((0, 0, 1, 2, 4, 1000))),
        own=None if more is None else bucket + more, window=draw(st.sampled_from((0, 1, 3, 1000))),
    )  # fmt: skip


@st.composite
def stretched_settings(draw: Any) -> PlanSetting:
    """Sequences of up to 2^40 tokens whose plans are those of short ones, at other positions.

    A factor of one more than a multiple of the ranks leaves positions where they are when they are dealt in turn.
    """
    heads, kv_heads = draw(st.sampled_from(HEADS))
    p = draw(st.integers(1, 4))
    n = 2 * p * draw(st.integers(1, 4))
    pattern = draw(patterns(heads))
    if draw(st.booleans()):
        pattern = draw(with_slices(pattern, n))
    by = 1 + p * draw(st.integers(2**31 // p, 2**40 // n // p - 1))
    order = draw(st.sampled_from(("contiguous", "zigzag", "striped", "cut")))
    if order == "cut":
        cuts = (0, *sorted(draw(st.integers(0, n)) for _ in range(p - 1)), n)
        short, long = (Layout.from_cuts(range(n * x), [x * cut for cut in cuts]) for x in (1, by))
    else:
        short, long = (getattr(Layout, order)(n * x, p) for x in (1, by))
    return PlanSetting(
        replace(pattern, documents=draw(documents(n))), short, heads, kv_heads,
        exchange=draw(st.sampled_from(("ring", "direct"))), bucket=draw(st.sampled_from((1, 2, 5, 1000))), by=by,
        stretched=long, window=draw(st.sampled_from((0, 1000))),
    )  # fmt: skip
