"""Pictures of patterns: shares of pairs beside the definition, and SVG that any reader parses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Branch, Pattern, mask_picture
from reference.mask_picture import Grid, density
from reference.pattern import multiplicity, slices_seen
from reference.slices import CAUSAL, Slice
from reference.svg import SHADES, Field, cell_tokens, fields
from tests.support.drawn_patterns import branches, patterns, slices


def blocks(mask: np.ndarray, size: int) -> np.ndarray:
    """Mean of each block of `size` rows and columns; the last ones may be smaller."""
    n = len(mask)
    cuts = range(0, n, size)
    return np.array([[mask[i : i + size, j : j + size].mean() for j in cuts] for i in cuts]).reshape(len(cuts), -1)


@pytest.mark.parametrize("drawn", [False, True])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_cells_have_the_mean_of_the_definition(drawn: bool, data: st.DataObject) -> None:
    """Up to 64 rows a cell all are counted: 40 tokens have cells of 1, 500 of 8. If all places are drawn, the rows at
    them add up to each row once, in the cell of the row."""
    n, causal = data.draw(st.integers(1, 40) | st.integers(90, 200) | st.integers(200, 500)), data.draw(st.booleans())
    branch = replace(data.draw(branches(1, longest=n)), slices=data.draw(st.none() | slices(n)))
    cuts = data.draw(st.none() | st.lists(st.integers(0, n), max_size=4).map(sorted))
    documents = None if cuts is None else tuple(np.diff([0, *cuts, n]).tolist())
    pattern, at = Pattern((branch,), causal, documents), torch.arange(n)
    (offset,) = branch.offsets(1)
    assert offset is not None
    grid = Grid(branch.segment_length, branch.dilation_rate, offset, slices_seen(branch, causal))
    with pytest.MonkeyPatch.context() as patch:
        if drawn:
            patch.setattr(mask_picture, "_PLACES", 0)
            patch.setattr(mask_picture, "_places", lambda edges: np.arange(edges[-1]))
        found = density(grid, n, pattern.packed)
    exact = blocks(multiplicity(pattern, at, at, 1)[0].numpy(), cell_tokens(n))
    assert np.allclose(found, exact, rtol=1e-12, atol=1e-14) and ((found > 0) == (exact > 0)).all()


@pytest.mark.parametrize("rate", [1, 3, 4, 64, 500, 2**15])
@pytest.mark.parametrize("offset", [0, 1])
def test_sampled_cells_miss_no_row(rate: int, offset: int) -> None:
    """Cells of 2^14 tokens in segments of 2^18. A cell's share of rows is off by those that cross its edges: a place in
    64 at each, and a row. Of a rate beyond the cells' size, every other cell has a row."""
    found = density(Grid(2**18, rate, offset % rate, (CAUSAL,)), 2**20)
    cells = np.arange(64)
    same, below = cells[:, None] // 16 == cells // 16, cells[:, None] > cells
    assert (found[~same | (cells[:, None] < cells)] == 0).all()
    if rate < 2**14:
        assert np.allclose(found[same & below], 1 / rate**2, rtol=2 / 64 + 2 * rate / 2**14)
        assert np.allclose(found.diagonal(), 0.5 / rate**2, rtol=0.1 + 2 * rate / 2**14)
    else:
        seen = (cells[:, None] % 2 == 0) & (cells % 2 == 0)
        assert ((found > 0) == (same & (below | np.eye(64, dtype=bool)) & seen)).all()


def test_sampled_cells_have_the_mean_of_all_rows() -> None:
    """Documents, a window and a rate that divide nothing: the sum over all cells beside the work of every row."""
    lengths, grid = (20001, 5, 3000, 99), Grid(1777, 7, 3, (Slice(low=-901, high=0),))
    n, at, pattern = sum(lengths), torch.arange(sum(lengths)), Pattern((Branch(1777, 7, 3, None, 901),), True, lengths)
    found = density(grid, n, pattern.packed)
    sizes = np.minimum(np.full(len(found), cell_tokens(n)), n - np.arange(len(found)) * cell_tokens(n))
    exact = sum(int(multiplicity(pattern, rows, at[max(0, int(rows[0]) - 901) :], 1).sum()) for rows in at.split(99))
    assert np.isclose((found * sizes[:, None] * sizes).sum(), exact, rtol=0.02)


def texts(svg: str) -> list[str]:
    return [x.text or "" for x in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


LONGNET = Pattern.longnet([2048, 8192, 32768], [1, 4, 12], heads=12, causal=True)


@pytest.mark.parametrize(
    ("pattern", "sizes", "said"),
    [
        (Pattern.dense(causal=True), {}, ["1 head", "32 tokens, causal", "1"]),
        (Pattern.longnet([8, 16], [1, 2], heads=1), {}, ["32 tokens", "2 or more"]),
        (LONGNET, {}, ["12 heads, mean", "head 0", "head 2", "64 Ki"]),
        (LONGNET, {"tokens": 2**40}, ["1 Ti", "less than 1/32"]),
        (Pattern.longnet([8], [2], heads=8), {}, ["heads 0, 2, 4, ...", "heads 1, 3, 5, ..."]),
        (Pattern.dense(), {"heads": 3}, ["3 heads"]),
        (Pattern.dense(window=63), {}, ["256"]),
        (Pattern((Branch(None, 64),)), {}, ["1 Ki"]),
        (Pattern.dense(window=2**70), {}, ["1 Ti"]),
        (Pattern((Branch(2**80, 2**75, 2**74),)), {"tokens": 100}, ["100 tokens; a cell has 2 rows and keys"]),
        (Pattern.dense(documents=(100, 0, 30)), {}, ["130 tokens, 3 documents; a cell has 2 rows and keys"]),
        (Pattern.dense(documents=()), {}, ["0 tokens, 0 documents"]),
        (Pattern((Branch(heads=range(1, 3)),)), {}, ["3 heads, mean", "head 0", "heads 1, 2"]),
        (Pattern.tree([None, 0, 0], [6, 4, 4]), {}, ["14 tokens, causal, 1 document"]),
        (Pattern.spans([(3, 6)]), {}, ["32 tokens"]),
        (Pattern((Branch(slices=(Slice(0, 9, 0, 9, 1),)),), causal=True), {"tokens": 20}, ["20 tokens"]),
        (
            Pattern.frames([1560] * 60),
            {},
            ["93,600 tokens, 1 document; a cell has 1 Ki rows and keys, counted at 64 rows"],
        ),
    ],
)
def test_pictures_have_captions(pattern: Pattern, sizes: dict[str, int], said: list[str]) -> None:
    picture = pattern.picture(**sizes)
    assert set(said) <= set(texts(picture.svg)), texts(picture.svg)
    assert len(picture.svg) < 60_000 and repr(picture) == "Picture()"
    assert sizes or pattern._repr_html_() == picture._repr_html_() == picture.svg


@settings(max_examples=50, deadline=None)
@given(patterns(3, packed=True) | patterns(3, sliced=30))
def test_every_pattern_has_a_picture(pattern: Pattern) -> None:
    assert texts(pattern.picture().svg)


def test_the_mean_counts_every_head() -> None:
    """Two of three heads see everything: 2/3."""
    svg = Pattern((Branch(heads=range(1, 3)),)).picture(1).svg
    assert re.findall(r'<path fill="(#\w+)"', svg) == [SHADES[3][1]] * 2 and "5/8 to 3/2" in texts(svg)


@pytest.mark.parametrize(
    ("pattern", "sizes", "said"),
    [
        (Pattern.dense(), {"tokens": -1}, "tokens must be an integer >= 0, got -1"),
        (Pattern.dense(), {"tokens": 2**40 + 1}, "tokens must be at most 2**40"),
        (Pattern.dense(documents=(3, 4)), {"tokens": 8}, "documents must add up to the 8 tokens"),
        (LONGNET, {"heads": 3}, "pattern must be one for the 3 query heads"),
    ],
)
def test_wrong_sizes_are_refused(pattern: Pattern, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        pattern.picture(**sizes)


def test_cells_and_lines_are_where_they_belong() -> None:
    values = np.array([[0.0, 1, 1], [2, 0, 1 / 32]])
    svg = fields([Field("<&>", values, (1,), (1,))], (30, 20), ("a", "b"), "3", ["note"]).svg
    paths = dict(re.findall(r'<path fill="(#\w+)" d="([^"]+)"', svg))
    assert list(paths.values()) == ["M2 1h1v1h-1z", "M1 0h2v1h-2z", "M0 1h1v1h-1z"]
    assert "M30.0 22v20M20 32.0h30" in svg and "<&>" in texts(svg)
    assert texts(svg)[-4:] == ["note", "1/32 to 1/8", "5/8 to 3/2", "more than 3/2"]
