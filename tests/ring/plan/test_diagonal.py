"""Calls for heads with shifted grids: tiles written by hand go in; of what comes out, every head's rows are read off.

Where heads cannot go into fewer calls, the very tiles that went in come out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ring.plan.blocks import Heads
from ring.plan.diagonal import along_diagonals
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile

PLENTY = 1000  # slots of keys in a call
Half = tuple[int, list[list[int]]]  # a head, and the rows (folds, length) that it has in a tile


def tile(query: Rows, key: Rows, *heads: int, key_heads: tuple[int, ...] | None = None) -> Tile:
    """Of these query heads, each with a key head of its own: the one of the same number unless `key_heads` says."""
    of_keys = heads if key_heads is None else key_heads
    return Tile(query, key, Heads.of(tuple((h,) for h in heads)), Heads.of(tuple((h,) for h in of_keys)), Mask.FULL)


def grid(start: int, length: int = 4, step: int = 4) -> Rows:
    return Rows(start, step, length)


def listing(*folds: list[int]) -> Rows:
    found = Rows.of(np.array(folds))
    assert found.index is not None  # no grid
    return found


def call(one: Tile) -> list[tuple[Half, Half]]:
    """Query and key half of every head of a tile."""
    query, key = (
        [(head, (rows.listed() + i * rows.head_step).tolist()) for i, (head,) in enumerate(heads.listed())]
        for rows, heads in ((one.query_rows, one.query_heads), (one.key_rows, one.key_heads))
    )
    return list(zip(query, key, strict=True))


def heads(one: Tile) -> list[int]:
    return [head for (head, _), _ in call(one)]


def check(tiles: list[Tile], wanted: list[list[int]], most: int = PLENTY, packed: bool = True) -> None:
    """The calls are for the wanted heads, and each head keeps the rows that it had."""
    found = along_diagonals(tiles, most, packed)
    assert [heads(one) for one in found] == wanted
    was, now = (sorted(half for one in these for half in call(one)) for these in (tiles, found))
    assert now == was


# --- what goes into one call ---


def test_a_grid_for_every_offset() -> None:
    """LongNet's rate 4 and 12 heads: an offset has heads 0, 4, 8 or the like, and each goes with the next three."""
    blocks = [tile(grid(offset), grid(offset), offset, offset + 4, offset + 8) for offset in range(4)]
    check(blocks, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])


def test_two_heads_are_enough() -> None:
    two = [tile(grid(0), grid(2), 5), tile(grid(1), grid(3), 7)]
    (one,) = along_diagonals(two, PLENTY, packed=True)
    assert call(one) == [
        ((5, [[0, 4, 8, 12]]), (5, [[2, 6, 10, 14]])),
        ((7, [[1, 5, 9, 13]]), (7, [[3, 7, 11, 15]])),
    ]  # fmt: skip


@pytest.mark.parametrize("packed", (False, True))
def test_heads_of_two_branches_on_the_same_rows(packed: bool) -> None:
    check([tile(grid(0), grid(0), 0), tile(grid(0), grid(0), 1)], [[0, 1]], packed=packed)


def test_subranges_of_each_head() -> None:
    """A bucket cuts every head's rows alike: the first subranges are a call, and the second ones."""
    cut = [tile(grid(start + head), grid(start + head), head) for head in range(3) for start in (0, 16)]
    check(cut, [[0, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize("folds", ([[0, 1, 3], [9, 11, 12]], [[0], [1], [3]]))
def test_listed_rows_that_are_shifted(folds: list[list[int]]) -> None:
    """In any order: the last head comes first, and the others lie before it."""
    blocks = []
    for head in (2, 1, 0):
        query, key = ([[row + by for row in rows] for rows in folds] for by in (head, head + 5))
        blocks.append(tile(listing(*query), listing(*key), head))
    check(blocks, [[0, 1, 2]])


def test_no_more_keys_and_heads_than_may_be() -> None:
    """7 heads with 2 segments of 4 keys each: 24 slots are three heads, 31 no more."""
    for most in (24, 31):
        blocks = [tile(grid(h), Rows(h, 1, 4, 10, 2), h) for h in range(7)]
        check(blocks, [[0, 1, 2], [3, 4, 5], [6]], most)


def test_uneven_distances() -> None:
    for rows, wanted in (((0, 1, 2, 4, 6, 9), [[0, 1, 2], [3, 4], [5]]), ((0, 3, 6, 8, 10), [[0, 1, 2], [3, 4]])):
        check([tile(grid(row), grid(row), head) for head, row in enumerate(rows)], wanted)


# --- what a shard's own keys allow: each key's gradient is written once in a call ---


def test_own_keys_of_different_heads() -> None:
    check([tile(grid(h), grid(h), h) for h in range(4)], [[0, 1, 2, 3]], packed=False)


def test_own_keys_of_one_head_on_different_rows() -> None:
    check([tile(grid(h), grid(h), h, key_heads=(0,)) for h in range(4)], [[0, 1, 2, 3]], packed=False)


@pytest.mark.parametrize("packed", (False, True))
def test_own_keys_that_the_first_head_reads_too(packed: bool) -> None:
    """Keys 0 2 4 6, then 3 5 7 9, then 6 8 10 12; packed, they are slots of their own."""
    blocks = [tile(grid(h), grid(3 * h, step=2), h, key_heads=(0,)) for h in range(3)]
    check(blocks, [[0, 1, 2]] if packed else [[0, 1], [2]], packed=packed)


# --- what stays as it is ---


def unchanged(*tiles: Tile) -> None:
    """Tiles compare by identity."""
    assert along_diagonals(tiles, PLENTY, packed=True) == list(tiles)


def test_what_would_be_as_many_calls() -> None:
    """The second head lies before the first."""
    unchanged(tile(grid(1), grid(1), 0), tile(grid(0), grid(0), 1))


def test_what_would_be_more_calls() -> None:
    """Head by head they go to and fro: three calls of two heads instead of two of three."""
    unchanged(tile(grid(0), grid(0), 0, 2, 4), tile(grid(1), grid(1), 1, 3, 5))


def test_what_is_masked_by_position() -> None:
    """The mask has the positions of one head's rows."""
    at = torch.arange(4)[None]
    shifted = [tile(grid(h), grid(h), h) for h in range(3)]
    unchanged(*(replace(x, mask=Mask.POSITION, query_positions=at + i, key_positions=at + i)
                for i, x in enumerate(shifted)))  # fmt: skip


@pytest.mark.parametrize(
    "other",
    (
        tile(grid(1, step=3), grid(1), 1),
        tile(grid(1, length=3), grid(1), 1),
        tile(grid(1), grid(1, length=3), 1),
        tile(grid(1), Rows(1, 4, 4, 20, 2), 1),
        replace(tile(grid(1), grid(1), 1), mask=Mask.CAUSAL),
        tile(listing([0, 4, 8, 13]), grid(1), 1),
    ),
)
def test_tiles_that_differ_in_more_than_their_place(other: Tile) -> None:
    unchanged(tile(grid(0), grid(0), 0), other)


def test_listed_rows_that_differ_but_for_the_first() -> None:
    unchanged(tile(listing([0, 1, 3]), listing([0, 2, 3]), 0), tile(listing([0, 2, 3]), listing([0, 1, 3]), 1))


@pytest.mark.parametrize(
    "other",
    (
        Tile(grid(0), grid(0), Heads.of(((0,), (1,), (3,))), Heads.of(((0,), (1,), (2,))), Mask.FULL),
        Tile(grid(0), grid(0), Heads.of(((0,), (3,), (6,))), Heads.of(((0,), (1,), (3,))), Mask.FULL),
        Tile(grid(0), grid(0), Heads.of(((0, 1), (2, 3))), Heads.of(((0,), (1,))), Mask.FULL),
    ),
    ids=("listed query heads", "listed key heads", "two query heads of a key head"),
)
def test_heads_that_are_not_one_step_apart_stay_out(other: Tile) -> None:
    """While others, of the same shape, go into one call."""
    kept, joined = along_diagonals([other, tile(grid(1), grid(1), 8), tile(grid(2), grid(2), 9)], PLENTY, packed=True)
    assert kept is other and heads(joined) == [8, 9]
