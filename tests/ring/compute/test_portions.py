"""A backward on GPUs by groups of heads: which, told from integers alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ring.compute import kernels
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile


def portioned(tile: Tile, most: int, monkeypatch: pytest.MonkeyPatch, gpu: bool = True, name: str = "cudnn") -> Any:
    """In portions of so many bytes, of a call with batch 3 and head dim 8."""
    monkeypatch.setattr(kernels, "MOST_WORKSPACE", most)
    whole: Any = SimpleNamespace(is_cuda=gpu, shape=(3, 1000, 1000, 8))
    return kernels.portions(name, tile, whole)


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1] * 5), (12288, [1] * 5), (24576, [2, 2, 1]), (49152, [4, 1]), (5 * 12288, [5])]
)
def test_a_backward_on_gpus_goes_by_groups_of_heads(
    most: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 groups of 2 query heads; 4 folds of 7 rows that see 4 folds of 9 keys: 64 tokens, 4 bytes each for every batch,
    head of a group and number of it, 12288 bytes a group.
    """
    rows, keys = Rows(10, 2, 7, 50, 4, head_step=3), Rows(20, 1, 9, 60, 4, head_step=1)
    tile = Tile(rows, keys, Heads(5, 2, 30, 4, 1), Heads(5, 1, 40, 2, 1), Mask.FULL)
    parts = portioned(tile, most, monkeypatch)
    firsts = dict(zip(accumulate(counts, initial=0), counts, strict=False))
    assert [part.query_heads for part in parts] == [Heads(n, 2, 30 + 4 * i, 4, 1) for i, n in firsts.items()]
    assert [part.key_heads for part in parts] == [Heads(n, 1, 40 + 2 * i, 2, 1) for i, n in firsts.items()]
    assert [part.query_rows.key for part in parts] == [replace(rows, start=10 + 3 * i).key for i in firsts]
    assert [part.key_rows.key for part in parts] == [replace(keys, start=20 + i).key for i in firsts]


def test_portions_of_listed_rows_and_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = replace(Rows.of(np.array([[3, 4, 9]])), head_step=5)
    tile = Tile(listed, listed, Heads(2, 1, 0, 1, 1), Heads(2, 1, 0, 1, 1), Mask.FULL)
    first, second = portioned(tile, 1, monkeypatch)
    assert first.query_rows.listed().tolist() == [[3, 4, 9]]
    assert second.query_rows.listed().tolist() == second.key_rows.listed().tolist() == [[8, 9, 14]]
    unordered = replace(tile, key_heads=Heads.of(((0,), (3,), (4,))))
    assert portioned(unordered, 1, monkeypatch) == [unordered]
    assert portioned(tile, 1, monkeypatch, gpu=False) == [tile] == portioned(tile, 1, monkeypatch, name="math")
