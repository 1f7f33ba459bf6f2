"""Pictures of layouts: shares of cells beside listed positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.svg import cell_tokens
from ring.layout import Layout
from ring.layout_picture import held

ORDERS = (Layout.contiguous, Layout.zigzag, Layout.striped, Layout.hilbert)


def listed(layout: Layout, ranks: int) -> np.ndarray:
    """The shares, position by position."""
    size, rows = cell_tokens(layout.n), -(-layout.world_size // ranks)
    counts = np.zeros((rows, -(-layout.n // size)))
    for rank in range(layout.world_size):
        for position in layout.positions(rank).tolist():
            counts[rank // ranks, position // size] += 1
    return counts / [min(size, layout.n - i * size) for i in range(counts.shape[1])]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_shares_are_those_of_the_positions(data: st.DataObject) -> None:
    n, p = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 9))
    if data.draw(st.booleans()):
        layout = data.draw(st.sampled_from(ORDERS))(n, p)
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)))
        step = data.draw(st.integers(1, 4))
        stepping = [x for first in range(step) for x in range(first, n, step)]
        layout = Layout.from_cuts(data.draw(st.just(stepping) | st.permutations(range(n))), (0, *cuts, n))
    ranks = data.draw(st.integers(1, 4))
    assert np.array_equal(held(layout.cuts, layout.runs, layout.listed, ranks), listed(layout, ranks))


@pytest.mark.parametrize("make", ORDERS[:3])
def test_layouts_of_any_size_are_drawn(make: Callable[[int, int], Layout]) -> None:
    layout = make(2**40, 4096)
    svg = layout._repr_html_()
    assert len(svg) < 20_000 and ">3968 to 4095<" in svg and ">1 Ti tokens on 4096 ranks; a cell has 16 Gi<" in svg


def test_documents_are_lines_and_must_fit() -> None:
    layout, lengths = Layout.zigzag(12, 2, documents=(5, 7)), (5, 7)
    assert f"M{56 + 5 * 60:.1f} 22v28" in layout.picture(lengths).svg and layout._repr_html_() == layout.picture().svg
    with pytest.raises(ValueError, match="documents must add up to the 12 tokens"):
        layout.picture((5, 6))
