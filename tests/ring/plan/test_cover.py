"""Tiles whose results are written in place cover everything once; if none do, nothing is written in place."""

from __future__ import annotations

import numpy as np
import pytest

from ring.plan.blocks import Heads
from ring.plan.cover import Area, area, cover
from ring.plan.rows import Rows


def of(rows: tuple[int, int], heads: tuple[int, int]) -> Area:
    return Area(range(*rows), range(*heads))


ALL, LEFT, RIGHT = of((0, 8), (0, 4)), of((0, 8), (0, 1)), of((0, 8), (1, 4))
TOP, BOTTOM = of((0, 3), (0, 4)), of((3, 8), (0, 4))
COVERS = {
    "one": ([ALL], {0}),
    "what else lies in it": ([ALL, TOP, LEFT, None], {0}),
    "by heads": ([LEFT, RIGHT], {0, 1}),
    "by rows, with others between": ([TOP, LEFT, None, BOTTOM], {0, 3}),
    "by both": ([of(rows, heads) for rows in ((0, 3), (3, 8)) for heads in ((0, 2), (2, 4))], {0, 1, 2, 3}),
    "a hole": ([of((0, 3), (0, 4)), of((4, 8), (0, 4))], set()),
    "some heads in more parts": ([LEFT, of((0, 3), (1, 4)), of((3, 8), (1, 4))], set()),
    "none": ([None, None], set()),
}


@pytest.mark.parametrize(("areas", "expected"), COVERS.values(), ids=COVERS)
def test_covers(areas: list[Area | None], expected: set[int]) -> None:
    parts = [
        None if x is None else (Rows(x.rows.start, 1, len(x.rows)), Heads(len(x.heads), 1, x.heads.start, 1, 1))
        for x in areas
    ]
    assert cover(parts, 8, 4) == expected


def test_areas_are_consecutive_rows_and_heads() -> None:
    rows, heads = Rows(2, 1, 3, 3, 2), Heads(2, 2, 0, 2, 1)
    assert area(rows, heads) == of((2, 8), (0, 4))
    for other in (Rows(2, 2, 3), Rows(2, 1, 3, 4, 2), Rows(2, 1, 3, 3, 2, head_step=1), Rows.of(np.array([[0, 5, 1]]))):
        assert area(other, heads) is None
    for kind in (Heads(2, 2, 0, 3, 1), Heads(2, 2, 0, 1, 2), Heads.of(((0, 3), (1, 2)))):
        assert area(rows, kind) is None
