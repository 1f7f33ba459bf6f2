"""Layouts that hold the same positions in the same order are equal, in whatever runs these were given."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ring.layout import Layout, Run
from tests.support.orders import orders_and_cuts


def positions(runs: list[Run]) -> list[int]:
    return [run.start + i * run.step for run in runs for i in range(run.length)]


@st.composite
def cut_into_runs(draw: Any) -> tuple[tuple[Run, ...], tuple[Run, ...], list[int]]:
    """An order as two lists of runs, which divide it at drawn places and wherever they must, and as its positions."""
    order, _ = draw(orders_and_cuts())
    divided = []
    for _ in range(2):
        cuts, runs, at = draw(st.sets(st.integers(0, len(order)), max_size=6)), [], 0
        while at < len(order):
            end, step = at + 1, order[at + 1] - order[at] if at + 1 < len(order) else 0
            while step > 0 and end < len(order) and end not in cuts and order[end] - order[end - 1] == step:
                end += 1
            runs.append(Run(order[at], step if end - at > 1 else draw(st.integers(1, 9)), end - at))
            at = end
        divided.append(tuple(runs))
    return divided[0], divided[1], order


@given(cut_into_runs(), st.integers(1, 3))
def test_layouts_of_one_order_are_equal_however_it_is_cut_into_runs(
    drawn: tuple[tuple[Run, ...], tuple[Run, ...], list[int]], p: int
) -> None:
    one, other, order = drawn
    cuts = tuple(r * len(order) // p for r in range(p + 1))
    a, b = (Layout(len(order), cuts, runs) for runs in (one, other))
    assert a == b and hash(a) == hash(b) and a.runs == b.runs
    for rank in range(p):
        assert positions(a.shard_runs(rank)) == order[cuts[rank] : cuts[rank + 1]] == b.positions(rank).tolist()
    listed = Layout.from_cuts(order, cuts)
    assert listed.runs in (None, a.runs) and (listed.runs is None or listed == a)


@given(st.integers(0, 60), st.integers(1, 9))
def test_named_layouts_are_equal_to_those_of_the_same_order(n: int, p: int) -> None:
    for make in (Layout.contiguous, Layout.zigzag, Layout.striped):
        layout = make(n, p)
        order = torch.cat([layout.positions(rank) for rank in range(p)])
        again = Layout.from_cuts(order, layout.cuts)
        assert again == layout if again.runs is not None else len(layout.runs or ()) > 2 * p


def test_runs_that_continue_each_other_are_one() -> None:
    def merged(*runs: tuple[int, int, int]) -> tuple[Run, ...] | None:
        n = sum(length for _, _, length in runs)
        return Layout(n, (0, n), tuple(Run(*run) for run in runs)).runs

    assert merged((0, 1, 3), (3, 1, 0), (3, 1, 2), (5, 7, 1)) == ((0, 1, 6),)
    assert merged((0, 2, 1), (2, 2, 2), (1, 1, 1), (3, 1, 1)) == ((0, 2, 3), (1, 2, 2))
    assert merged((0, 1, 2), (2, 2, 2), (3, 1, 1)) == ((0, 1, 3), (4, 1, 1), (3, 1, 1))
    assert merged((1, 1, 1), (0, 1, 1), (2, 3, 1)) == ((1, 1, 1), (0, 2, 2))
    assert merged() == ()
