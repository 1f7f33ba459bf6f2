"""Calls for heads with shifted grids: tiles written by hand go in, and of what comes out every head's rows are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from ring.plan.blocks import Heads
from ring.plan.diagonal import merge_diagonals
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile

PLENTY = 1000  # slots of keys in a call


def tile(query: Rows, key: Rows, *heads: int, key_heads: tuple[int, ...] | None = None) -> Tile:
    """A call for these query heads, each with a key head of its own: the one of its number unless `key_heads` says."""
    of_keys = heads if key_heads is None else key_heads
    return Tile(query, key, Heads.of(tuple((h,) for h in heads)), Heads.of(tuple((h,) for h in of_keys)), Mask.FULL)


def grid(start: int, length: int = 4, step: int = 4) -> Rows:
    return Rows(start, step, length)


def halves(one: Tile) -> list[list[tuple[int, list[list[int]]]]]:
    """For each head of a tile (head, its rows) of the queries and of the keys."""
    query, key = (
        [(head, (rows.listed() + i * rows.head_step).tolist()) for i, (head,) in enumerate(heads.listed())]
        for rows, heads in ((one.query_rows, one.query_heads), (one.key_rows, one.key_heads))
    )
    return [list(pair) for pair in zip(query, key, strict=True)]


def heads(one: Tile) -> list[int]:
    return [head for (head, _), _ in halves(one)]


def shifted(*folds: list[int]) -> list[Tile]:
    """Listed rows of three heads: the last head comes first, and the others lie before it."""
    listed = np.array(folds)
    return [tile(Rows.of(listed + head), Rows.of(listed + head + 5), head) for head in (2, 1, 0)]


def at_rows(rows: Iterable[int]) -> list[Tile]:
    return [tile(grid(row), grid(row), head) for head, row in enumerate(rows)]


# Tiles, and the heads of the calls that they become. Of a shard's own keys (not packed) each key's gradient is written
# once in a call.
JOINED: dict[str, tuple[list[Tile], list[list[int]], int, tuple[bool, ...]]] = {
    # LongNet's rate 4 and 12 heads: an offset has heads 0, 4, 8 or the like, and each goes with the next three.
    "a grid for every offset": (
        [tile(grid(o), grid(o), o, o + 4, o + 8) for o in range(4)],
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], PLENTY, (True,),
    ),
    # A bucket cuts every head's rows alike: the first subranges are a call, and the second ones.
    "subranges of each head": (
        [tile(grid(start + h), grid(start + h), h) for h in range(3) for start in (0, 16)],
        [[0, 1, 2], [0, 1, 2]], PLENTY, (True,),
    ),
    "listed rows in folds": (shifted([0, 1, 3], [9, 11, 12]), [[0, 1, 2]], PLENTY, (True,)),
    # 7 heads with 2 segments of 4 keys each: 31 slots are three heads.
    "a bucket": (
        [tile(grid(h), Rows(h, 1, 4, 10, 2), h) for h in range(7)], [[0, 1, 2], [3, 4, 5], [6]], 31, (True,)
    ),
    "uneven distances": (at_rows((0, 3, 6, 8, 10)), [[0, 1, 2], [3, 4]], PLENTY, (True,)),
    "keys of one head on different rows": (
        [tile(grid(h), grid(h), h, key_heads=(0,)) for h in range(4)], [[0, 1, 2, 3]], PLENTY, (False, True)
    ),
    # Keys 0 2 4 6, then 3 5 7 9, then 6 8 10 12.
    "keys that the first head reads too": (
        [tile(grid(h), grid(3 * h, step=2), h, key_heads=(0,)) for h in range(3)], [[0, 1], [2]], PLENTY, (False,)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tiles", "wanted", "most", "packed"), JOINED.values(), ids=JOINED)
def test_heads_of_shifted_grids_share_calls(
    tiles: list[Tile], wanted: list[list[int]], most: int, packed: tuple[bool, ...]
) -> None:
    """The calls are for the wanted heads, and each head keeps the rows that it had."""
    for one in packed:
        found = merge_diagonals(tiles, most, one)
        assert [heads(call) for call in found] == wanted
        was, now = (sorted(half for call in calls for half in halves(call)) for calls in (tiles, found))
        assert now == was


FIRST, SECOND = at_rows(range(2))
UNCHANGED = {
    # Head by head they go to and fro: three calls of two heads instead of two of three.
    "more calls": (tile(grid(0), grid(0), 0, 2, 4), tile(grid(1), grid(1), 1, 3, 5)),
    "another step": (FIRST, tile(grid(1, step=3), grid(1), 1)),
    "another mask": (FIRST, replace(SECOND, mask=Mask.CAUSAL)),
    "listed heads": (tile(grid(0), grid(0), 0, 1, 3), tile(grid(1), grid(1), 8)),
}


@pytest.mark.parametrize("tiles", UNCHANGED.values(), ids=UNCHANGED)
def test_unmergeable_tiles_come_out_unchanged(tiles: tuple[Tile, ...]) -> None:
    """Tiles compare by identity."""
    assert merge_diagonals(tiles, PLENTY, packed=True) == list(tiles)
