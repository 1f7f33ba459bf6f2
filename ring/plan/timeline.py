"""Draws the stages of ranks: their kernels and, under them, the messages in flight meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.svg import Bar, Lane, Picture, lanes

_COLUMNS = 64  # at most; then a column is several stages


def steps_picture(title: str, name: str, scores: Sequence[int], slots: Sequence[int]) -> Picture:
    """Draw the steps of one rank, of equal width.

    Args:
        title: for the line above.
        name: of the rank.
        scores: that its kernels compute, of its own keys and of each step.
        slots: that it receives meanwhile, for the next step.
    """
    at = _columns(len(scores))
    columns, bars = range(len(at)), []
    for unit, values in (("scores", scores), ("slots", slots)):
        sums = np.add.reduceat(np.array(values, np.int64), at)
        most = max(int(sums.max()), 1)
        bars.append([Bar(i, 0.96 * int(x) / most, f"{x:,} {unit}") for i, x in enumerate(sums)])
        title += f"; longest bar {most:,} {unit}" if sums.any() else ""
    ticks = [(i, f"step {at[i]}" if i else "own keys") for i in columns if i % -(-len(at) // 12) == 0]
    return lanes([Lane(name, *bars)], len(at), ticks, title, ["messages: received for the next step"])


def seconds_picture(title: str, names: Sequence[str], computing: np.ndarray, messages: np.ndarray) -> Picture:
    """Draw stages of several ranks in time. A stage ends when its kernels and its messages have.

    Args:
        title: for the line above.
        names: of the ranks.
        computing, messages: seconds, (stages, ranks).
    """
    spent = np.maximum(computing, messages)
    ends = np.append(np.zeros_like(spent[:1]), np.cumsum(spent, axis=0), axis=0)
    at, total = _columns(len(spent)), float(ends[-1].max())
    begins, columns = ends[at], [np.add.reduceat(x, at) for x in (computing, messages)]
    rows = []
    for rank, name in enumerate(names):
        bars = [
            [
                Bar(float(begins[i, rank]), float(x[i, rank]), f"{1e3 * x[i, rank]:.4g} ms of {kind}")
                for i in range(len(x))
            ]
            for kind, x in zip(("kernels", "messages"), columns, strict=True)
        ]
        rows.append(Lane(name, *bars))
    ticks = [(total * i / 4, f"{1e3 * total * i / 4:.3g} ms") for i in range(5)]
    return lanes(rows, total, ticks, title, [f"{int(spent.any(1).sum())} stages"])


def _columns(stages: int) -> list[int]:
    """Return the first stage of each column."""
    return list(range(0, stages, -(-stages // _COLUMNS)))
