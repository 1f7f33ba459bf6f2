"""Drawn orders of a sequence's positions, and cuts into them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


@st.composite
def orders_and_cuts(draw: Any) -> tuple[list[int], tuple[int, ...]]:
    """From few runs, some of them reversed or interleaved, to plain permutations; empty shards occur."""
    n = draw(st.integers(0, 40))
    kind = draw(st.sampled_from(("range", "blocks", "residues", "permutation")))
    if kind == "range":
        order = list(range(n))
    elif kind == "blocks":
        edge = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
        parts = [list(range(a, b)) for a, b in zip([0, *edge], [*edge, n], strict=True)]
        order = [position for part in draw(st.permutations(parts)) for position in part]
    elif kind == "residues":
        step = draw(st.integers(1, 5))
        order = [position for r in draw(st.permutations(range(step))) for position in range(r, n, step)]
    else:
        order = draw(st.permutations(range(n)))
    inner = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    return order, (0, *inner, n)
