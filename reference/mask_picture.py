"""Draws a mask of any size: cells of some tokens, shaded by how many branches see a pair of theirs on average.

A row of a grid sees every r-th key between two ends of each slice, so its keys in every cell are counted exactly. All
rows of cells of up to 64 are counted. In larger cells 64 places are drawn. Each counts the grid's row at or before it,
divided by the number of places at which that row would be counted. So expected values are exact, and no row of many
places is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from reference.documents import Documents
from reference.slices import Slice
from reference.svg import Field, Picture, cell_tokens, document_lines, fields, tokens_text

_PLACES = 64  # in a cell at which rows are counted
_PANELS = 3  # of single heads


class Grid(NamedTuple):
    """The positions that a branch selects for a head, every `rate`-th of a segment from `offset` on; and its slices."""

    segment: int | None
    rate: int
    offset: int
    slices: tuple[Slice, ...]


def density(grid: Grid, n: int, documents: Documents | None = None) -> np.ndarray:
    """Return the share of pairs that a grid sees, by cell: (cells, cells), rows are queries."""
    size = cell_tokens(n)
    edges = np.minimum(np.arange(-(-n // size) + 1) * size, n)
    sizes, places = np.diff(edges), _places(edges)
    ends = np.array([n] if documents is None else np.cumsum(documents), np.int64)
    document = np.searchsorted(ends, places, side="right")
    begin = np.append(0, ends)[document]
    w = n if grid.segment is None else min(grid.segment, n)
    begin += (places - begin) // max(w, 1) * w
    end: np.ndarray = np.minimum(begin + w, ends[document])
    first: np.ndarray = begin + min(grid.offset, n)
    rate = min(grid.rate, 2 * n + 1)
    rows: np.ndarray = (
        first + np.maximum(places - first, 0) // rate * rate
    )  # the last one up to a place, or else the first
    if size <= _PLACES:
        chosen, weight = rows == places, np.ones(n)
    else:
        own = np.minimum(rows + rate, end) - np.where(rows == first, begin, rows)  # places of a row
        chosen, weight = first < end, (sizes / np.bincount(places // size))[places // size] / own
    rows, first, end, weight = (x[chosen, None] for x in (rows, first, end, weight))
    seen = np.zeros((len(rows), len(sizes)), np.int64)
    for q0, q1, k0, k1, low, high in (one.limits for one in grid.slices):
        own = slice(*np.searchsorted(rows[:, 0], (q0, q1)))
        begin = np.maximum(first[own], np.maximum(rows[own] + max(low, -n), k0))
        behind = np.minimum(end[own], np.minimum(rows[own] + min(high, n) + 1, k1))
        cells = slice(k0 // size, -(-min(k1, n) // size))
        until = np.clip(edges[cells.start : cells.stop + 1], begin, behind)  # of the row's keys, those before an edge
        seen[own, cells] += np.diff((until - first[own] + rate - 1) // rate)
    keys = np.cumsum(weight * seen, axis=0)
    before = np.append(np.zeros_like(keys, shape=(1, len(sizes))), keys, axis=0)[np.searchsorted(rows[:, 0], edges)]
    return np.diff(before, axis=0) / sizes[:, None] / sizes


def _places(edges: np.ndarray) -> np.ndarray:
    """Return all positions of a cell or, of more, one at random in each of `_PLACES` equal parts."""
    if len(edges) > 1 and edges[1] <= _PLACES:
        return np.arange(edges[-1])
    parts, draw = [], np.random.default_rng(0).integers
    for begin, end in pairwise(edges.tolist()):
        cuts = begin + np.arange(min(end - begin, _PLACES) + 1) * (end - begin) // min(end - begin, _PLACES)
        parts.append(draw(cuts[:-1], cuts[1:]))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def mask_picture(heads: Sequence[tuple[Grid, ...]], n: int, causal: bool, documents: Documents | None) -> Picture:
    """Draw the mean over all heads and, if heads differ, the first ones that do.

    Args:
        heads: the grids of each query head, at least one head.
        n: number of tokens.
        causal: True if no query sees a later key, for the note.
        documents: their lengths, which add up to n; None: one document.
    """
    alike: dict[tuple[Grid, ...], list[int]] = {}
    for head, grids in enumerate(heads):
        alike.setdefault(grids, []).append(head)
    seen = {grid: density(grid, n, documents) for grids in alike for grid in grids}
    size = cell_tokens(n)
    nothing = np.zeros((-(-n // size),) * 2)
    by_head = {grids: sum((seen[grid] for grid in grids), nothing) for grids in alike}
    mean = sum((len(alike[grids]) * by_head[grids] for grids in alike), nothing) / len(heads)
    panels = {f"{len(heads)} head{'s' * (len(heads) > 1)}{', mean' * (len(alike) > 1)}": mean}
    if len(alike) > 1:
        panels |= {_named(alike[grids]): by_head[grids] for grids in list(alike)[:_PANELS]}
    edges = document_lines(documents, size)
    note = f"{tokens_text(n)} tokens{', causal' * causal}"
    note += "" if documents is None else f", {len(documents)} document{'s' * (len(documents) != 1)}"
    if size > 1:
        sampled = f", counted at {_PLACES} rows" if size > _PLACES else ""
        note += f"; a cell has {tokens_text(size)} rows and keys{sampled}"
    return fields(
        [Field(title, values, edges, edges) for title, values in panels.items()],
        size=(210, 210) if len(panels) > 1 else (320, 320),
        axis=("query", "key"),
        end=tokens_text(n),
        notes=[note, "branches that see a pair, mean of a cell:"],
    )


def _named(heads: Sequence[int]) -> str:
    few = ", ".join(map(str, heads[:3]))
    return f"head {few}" if len(heads) == 1 else f"heads {few}{', ...' * (len(heads) > 3)}"
