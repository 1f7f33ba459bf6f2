"""Draws a layout of any size: a row for each rank, shaded by its share of the positions in each cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.documents import Documents
from reference.svg import Field, Picture, cell_tokens, document_lines, fields, tokens_text

_ROWS = 32  # at most; then a row is several ranks


def layout_picture(
    cuts: Sequence[int],
    runs: Sequence[tuple[int, int, int]] | None,
    listed: np.ndarray | None,
    documents: Documents | None,
) -> Picture:
    """Draw the order of `ring.layout.Layout`, as runs or listed, cut for the ranks, and lines between documents."""
    n, p = cuts[-1], len(cuts) - 1
    size, ranks = cell_tokens(n), -(-p // _ROWS)
    note = f"{tokens_text(n)} tokens on {p} rank{'s' * (p > 1)}; a cell has {tokens_text(size)}"
    shares = held(cuts, runs, listed, ranks)
    return fields(
        [Field("positions that each rank holds", shares, document_lines(documents, size))],
        size=(720, 14 * len(shares)),
        axis=("rank", "position"),
        end=tokens_text(n),
        notes=[note, "share of a cell that a rank holds:"],
        names=[f"rank {r}" if ranks == 1 else f"{r} to {min(r + ranks, p) - 1}" for r in range(0, p, ranks)],
    )


def held(
    cuts: Sequence[int], runs: Sequence[tuple[int, int, int]] | None, listed: np.ndarray | None, ranks: int = 1
) -> np.ndarray:
    """Return the share of each cell that every `ranks` ranks hold together, (rows, cells)."""
    n, p = cuts[-1], len(cuts) - 1
    size = cell_tokens(n)
    edges = np.minimum(np.arange(-(-n // size) + 1) * size, n)
    counts = np.zeros((-(-p // ranks), len(edges) - 1), np.int64)
    if runs is not None:
        rank, of_part = _parts(np.array(cuts), np.array(runs, np.int64).reshape(-1, 3), edges)
        np.add.at(counts, rank // ranks, of_part)
    elif listed is not None:
        np.add.at(counts, (np.repeat(np.arange(p), np.diff(cuts)) // ranks, listed // size), 1)
    return counts / np.diff(edges)


def _parts(cuts: np.ndarray, runs: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut the runs (start, step, length) between ranks. Return the rank of each part, and its positions by cell."""
    offsets = np.append(0, np.cumsum(runs[:, 2]))
    begins = np.unique(np.concatenate([offsets, cuts]))
    begins, length = begins[:-1], np.diff(begins)
    run = np.searchsorted(offsets, begins, side="right") - 1
    start, step = runs[run, 0] + (begins - offsets[run]) * runs[run, 1], runs[run, 1]
    before = np.clip(-((start[:, None] - edges) // step[:, None]), 0, length[:, None])  # positions before an edge
    return np.searchsorted(cuts, begins, side="right") - 1, np.diff(before)
