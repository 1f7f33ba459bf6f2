"""Draws a mask of any size: cells of some tokens, shaded by how many branches see a pair of theirs on average.

A row of a grid sees every r-th key between two ends, so its keys in every cell are counted exactly. All rows of a cell
are counted or, of more than 256, 16 runs of 16, each at random in its sixteenth of the cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from reference.documents import Documents
from reference.svg import Field, Picture, cell_tokens, document_lines, fields, tokens_text

_RUN = 16  # rows; as many runs of a cell are counted
_PANELS = 3  # of single heads


class Grid(NamedTuple):
    """The positions that a branch selects for a head, every `rate`-th of a segment from `offset` on; and its window."""

    segment: int | None
    rate: int
    offset: int
    window: int | None


def density(grid: Grid, n: int, causal: bool, documents: Documents | None = None) -> np.ndarray:
    """Return the share of pairs that a grid sees, by cell: (cells, cells), rows are queries."""
    size = cell_tokens(n)
    edges = np.minimum(np.arange(-(-n // size) + 1) * size, n)
    rows, counted = _rows(edges)
    ends = np.array([n] if documents is None else np.cumsum(documents), np.int64)
    document = np.searchsorted(ends, rows, side="right")
    begin, end = np.append(0, ends)[document], ends[document]
    w = n if grid.segment is None else min(grid.segment, n)
    rate, offset, window = (
        min(grid.rate, 2 * n + 1),
        min(grid.offset, n),
        n if grid.window is None else min(grid.window, n),
    )
    begin += (rows - begin) // max(w, 1) * w
    first, last = begin + offset, np.minimum(begin + w, end) - 1
    selected = (rows >= first) & ((rows - first) % rate == 0)
    rows, first, last = (x[selected, None] for x in (rows, first, last))
    last = rows if causal else np.minimum(last, rows + window)
    until = np.clip(
        edges, np.maximum(first, rows - window), last + 1
    )  # of the keys that a row sees, those before an edge
    keys = np.zeros((len(counted),) * 2, np.int64)
    np.add.at(keys, rows[:, 0] // size, np.diff((until - first + rate - 1) // rate))
    return keys / (counted[:, None] * np.diff(edges))


def _rows(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to count in every cell, in ascending order, and their number in each."""
    parts, draw = [], np.random.default_rng(0).integers
    for begin, end in pairwise(edges.tolist()):
        if end - begin <= _RUN**2:
            parts.append(np.arange(begin, end))
        else:
            cuts = begin + np.arange(_RUN + 1) * (end - begin) // _RUN
            parts.append((draw(cuts[:-1], cuts[1:] - _RUN + 1)[:, None] + np.arange(_RUN)).reshape(-1))
    return np.concatenate(parts) if parts else np.empty(0, np.int64), np.array([len(part) for part in parts], np.int64)


def mask_picture(heads: Sequence[tuple[Grid, ...]], n: int, causal: bool, documents: Documents | None) -> Picture:
    """Draw the mean over all heads and, if heads differ, the first ones that do.

    Args:
        heads: the grids of each query head, at least one head.
        n: number of tokens.
        causal: True keeps only the keys up to the query.
        documents: their lengths, which add up to n; None: one document.
    """
    alike: dict[tuple[Grid, ...], list[int]] = {}
    for head, grids in enumerate(heads):
        alike.setdefault(grids, []).append(head)
    seen = {grid: density(grid, n, causal, documents) for grids in alike for grid in grids}
    size = cell_tokens(n)
    nothing = np.zeros((-(-n // size),) * 2)
    by_head = {grids: sum((seen[grid] for grid in grids), nothing) for grids in alike}
    mean = sum((len(alike[grids]) * by_head[grids] for grids in alike), nothing) / len(heads)
    panels = {f"{len(heads)} head{'s' * (len(heads) > 1)}{', mean' * (len(alike) > 1)}": mean}
    if len(alike) > 1:
        panels |= {_named(alike[grids]): by_head[grids] for grids in list(alike)[:_PANELS]}
    edges = document_lines(documents, size)
    note = f"{tokens_text(n)} tokens{', causal' * causal}{'' if documents is None else f', {len(documents)} documents'}"
    if size > 1:
        sampled = f", of which {_RUN**2} rows are counted" if size > _RUN**2 else ""
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
