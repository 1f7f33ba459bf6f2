"""The time of a tile's kernel on a GPU, by the table of measured calls that `scripts/bench kernels` writes.

A call of so many heads, each of one sequence, takes

    seconds = start(length) + heads * operations of a head / rate(length)

The two calls of every length in the table, of few and of many heads, give both: start is what a GPU loses while it is
not full. Between the table's lengths they are interpolated by the logarithm. Below the shortest a head takes time in
proportion to its length. A sequence of a variable-length call takes the time of one among many of its length, rounded
up to the rows that a block of a kernel computes. A row with a window takes that of a row of such a sequence
without a mask, as long as the window and two blocks: the rows of a block see so many keys together, in whole blocks.

The table's calls are timed for some milliseconds, in which a GPU does not reach its power limit; only the longest take
more than 0.1 s. A GPU at its limit slows down by the more, the more operations it does. In steady state a rate is

    rate * (1 - THROTTLED * (rate / highest rate)^2)

THROTTLED is from "kernels alone" at 8 Ki tokens in the record `exchanges/h200x2_dense`: 1.77 ms forward and 4.82
backward, 1.55 and 4.46 by the table.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ring.compute.gpu.kernel_times import FILE, PASSES
from ring.compute.kernels import MEASURED
from ring.compute.kernels.kernel import Kernel
from ring.plan.tile import Mask, Tile

GPU = "NVIDIA H200"  # of the table
_BLOCK = 128  # rows
THROTTLED = 0.1


class _Curves(NamedTuple):
    """Logarithms of the table's lengths and of the rates of its heads, and the seconds of a start."""

    length: np.ndarray
    rate: np.ndarray
    start: np.ndarray


def products(passed: str, dim: int, value_dim: int) -> int:
    """Return the operations of a query and a key: 2 products forward, 5 backward."""
    return 2 * (dim + value_dim) if passed == PASSES[0] else 2 * (3 * dim + 2 * value_dim)


def taking(kernels: tuple[Kernel, ...], tile: Tile) -> tuple[Kernel, ...]:
    """Return those that take a tile. A mask by position counts as none: the table has no times of one."""
    tile = replace(tile, mask=Mask.FULL) if tile.mask is Mask.POSITION else tile
    return tuple(kernel for kernel in kernels if kernel.takes_tile(tile))


def tile_seconds(
    tile: Tile, passed: str, dims: tuple[int, int], batch: int, kernels: tuple[Kernel, ...] = MEASURED
) -> float:
    """Return the seconds of a tile, by the fastest kernel that takes it, else by the fastest of all.

    Args:
        tile: rows, keys, heads and mask.
        passed: "forward" or "backward".
        dims: head dims of keys and of values.
        batch: sequences.
        kernels: of MEASURED.
    """
    heads = batch * tile.query_rows.folds * tile.query_heads.groups * tile.query_heads.per_group
    sequences = None if tile.sequences is None else tile.sequences.key_bytes
    lengths = tile.query_rows.length, tile.key_rows.length
    return _shape_seconds(
        lengths, sequences, tile.window, heads, tile.is_triangle, passed, dims, taking(kernels, tile) or kernels
    )


@lru_cache(maxsize=4096)  # a plan has thousands of tiles of few shapes
def _shape_seconds(
    lengths: tuple[int, int], sequences: tuple[bytes, bytes] | None, window: int | None, heads: int, causal: bool,
    passed: str, dims: tuple[int, int], kernels: tuple[Kernel, ...],
) -> float:  # fmt: skip
    rows, keys = (np.array([x]) for x in lengths)
    if sequences is not None:
        rows, keys = (-(-np.diff(np.frombuffer(x, np.int64)) // _BLOCK) * _BLOCK for x in sequences)
    whole = call_seconds(rows * keys, heads, causal, passed, dims, kernels)
    if window is None:
        return whole
    seen = np.minimum(keys, window * (1 if causal else 2) + 2 * _BLOCK)
    return min(whole, call_seconds(seen * seen, heads * rows / seen, False, passed, dims, kernels))


def call_seconds(
    areas: np.ndarray, heads: int | np.ndarray, causal: bool, passed: str, dims: tuple[int, int],
    kernels: tuple[Kernel, ...] = MEASURED,
) -> float:  # fmt: skip
    """Return the seconds of a call on sequences of so many rows times keys, (sequences,), for each of the heads.

    Args:
        areas: of the sequences.
        heads: of all, or of each, (sequences,).
        causal: True for a causal mask.
        passed, dims, kernels: as in `tile_seconds`.
    """
    curves = _curves(passed, dims, causal, kernels)
    length, operations = np.log(areas) / 2, products(passed, *dims) * heads * areas
    rate = np.exp(np.interp(length, curves.length, curves.rate) + np.minimum(length - curves.length[0], 0))
    seconds = np.interp(length, curves.length, curves.start).max() + (operations / rate).sum()
    if length.max() >= curves.length[-1]:
        return float(seconds)
    power = operations.sum() / seconds / np.exp(curves.rate.max())
    return float(seconds / (1 - THROTTLED * power**2))


@lru_cache(maxsize=256)
def _curves(passed: str, dims: tuple[int, int], causal: bool, kernels: tuple[Kernel, ...]) -> _Curves:
    """Return the curves of the table's nearest head dims, scaled to these."""
    names = {kernel.name for kernel in kernels}
    calls = [
        row
        for row in _rows()
        if (row["passed"], row["causal"], row["varied"], row["window"]) == (passed, causal, False, 0)
        and not row["ms"].keys().isdisjoint(names)
    ]
    near = min(
        ((row["dim"], row["value_dim"]) for row in calls),
        key=lambda given: float(np.abs(np.log(np.array(given) / dims)).sum()),
    )
    times: dict[int, dict[int, float]] = {}
    for row in calls:
        if (row["dim"], row["value_dim"]) == near:
            fastest = min(ms for name, ms in row["ms"].items() if name in names)
            times.setdefault(row["length"], {})[row["heads"]] = 1e-3 * fastest
    lengths = sorted(times)
    start, rate = zip(*(_line(times[x], products(passed, *near) * x**2) for x in lengths), strict=True)
    return _Curves(np.log(lengths), np.log(rate), np.array(start))


def _line(times: dict[int, float], operations: int) -> tuple[float, float]:
    """Return the seconds of a start and the rate of heads, from seconds by heads. operations: of a head."""
    few, many = min(times), max(times)
    head = times[many] / many if few == many else (times[many] - times[few]) / (many - few)
    start = max(0.0, times[few] - few * head)
    return start, operations / (head if start else times[many] / many)


@lru_cache(maxsize=1)
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(FILE.read_text())["rows"]
    return rows
