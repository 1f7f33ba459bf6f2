"""Selects tiles that together cover a tensor once. A kernel writes their results in place: no merge copies them.

The example (see `ring.plan`): four rows of two heads. The first two tiles cover them, the third lies within the first.

    tile  rows     heads  covers
    0     0 1      0 1    yes
    1     2 3      0 1    yes
    2     0        0      no
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from ring.plan.blocks import Heads
from ring.plan.rows import Rows

_MAX_TILES = 256  # tried, each against all selected ones


class Area(NamedTuple):
    """Consecutive rows and heads."""

    rows: range
    heads: range

    def overlaps(self, other: Area) -> bool:
        return all(a.start < b.stop and b.start < a.stop for a, b in zip(self, other, strict=True))


def area(rows: Rows, heads: Heads) -> Area | None:
    """Return the area of a tile; None if its rows or heads are not consecutive and in order."""
    if rows.index is not None or heads.ids is not None or rows.head_step or rows.step != 1:
        return None
    if rows.folds > 1 and rows.fold_step != rows.length:
        return None
    if (heads.groups > 1 and heads.step != heads.per_group) or (heads.per_group > 1 and heads.inner != 1):
        return None
    return Area(
        range(rows.start, rows.start + rows.folds * rows.length),
        range(heads.start, heads.start + heads.groups * heads.per_group),
    )


def cover(parts: Iterable[tuple[Rows, Heads] | None], tokens: int, heads: int) -> frozenset[int]:
    """Return the indices of parts that together are all rows of all heads, each once; no index if there are none, or if
    some heads are divided into more parts than others. None: a part that cannot be selected.
    """
    selected: dict[int, Area] = {}
    for number, part in enumerate(islice(parts, _MAX_TILES)):
        one = None if part is None else area(*part)
        if one is not None and not any(one.overlaps(other) for other in selected.values()):
            selected[number] = one
    counts = np.zeros(heads, np.int64)
    for one in selected.values():
        counts[one.heads.start : one.heads.stop] += 1
    complete = sum(len(one.rows) * len(one.heads) for one in selected.values()) == tokens * heads
    return frozenset(selected) if complete and len(set(counts.tolist())) == 1 else frozenset()
