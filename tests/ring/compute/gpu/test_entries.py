"""The table of the merge kernel, checked without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ring.compute.gpu.entries import Field, entries_of, places_of
from ring.compute.gpu.parts import Part
from ring.plan.blocks import Heads
from ring.plan.rows import Rows

B, D = 2, 8


def test_an_entry_for_each_head_finds_every_row() -> None:
    """The numbers at the addresses are what `Rows` and `Heads` say: read back as the kernel does."""
    rows, heads = Rows(5, 3, 4, 20, 2, head_step=1), Heads(3, 2, 1, 4, 2)
    out = torch.arange(2 * B * 3 * 2 * 4 * D, dtype=torch.float32).view(2, B, 3, 2, 4, D)
    lse = out[..., 0].contiguous()
    found, table = entries_of(Part(rows, heads, out, lse), 32)
    assert found.tolist() == [1, 3, 5, 7, 9, 11] and table.shape == (6, len(Field))
    for entry, (group, member) in zip(table, np.ndindex(3, 2), strict=True):
        grid = [entry[x] for x in (Field.STEP, Field.LENGTH, Field.FOLD_STEP, Field.FOLDS)]
        assert (entry[Field.START], entry[Field.END]) == (5 + group, 5 + group + 20 + 9 + 1) and grid == [3, 4, 20, 2]
        assert entry[Field.IS_FP32] == 1 and entry[Field.DIVISOR] == 1
        first, first_lse = entry[Field.OUT] // 4, entry[Field.LSE] // 4
        for f, b, i in np.ndindex(2, B, 4):
            at = first + f * entry[Field.OUT_FOLD] + b * entry[Field.OUT_BATCH] + i * entry[Field.OUT_ROW]
            assert out.view(-1)[at] == out[f, b, group, member, i, 0]
            at = first_lse + f * entry[Field.LSE_FOLD] + b * entry[Field.LSE_BATCH] + i * entry[Field.LSE_ROW]
            assert lse.view(-1)[at] == lse[f, b, group, member, i]


def test_listed_rows_are_found_in_a_table() -> None:
    """By every head, also where rows go by the head."""
    rows = replace(Rows.of(np.array([[9, 4, 7], [2, 12, 3]])), head_step=2)
    out = torch.empty(2, 1, 2, 1, 3, D)
    _, table = entries_of(Part(rows, Heads(2, 1, 0, 1, 1), out, None), 32)
    places = places_of(rows, out.device)
    assert (table[:, Field.PLACES] == places.data_ptr()).all() and (table[:, Field.DIVISOR] == 1).all()
    assert table[:, Field.START].tolist() == [2, 4] and table[:, Field.END].tolist() == [13, 15]
    assert places.dtype == torch.int32 and len(places) == 11
    for fold, place in np.ndindex(2, 3):
        assert places[int(rows.listed()[fold, place]) - 2] == fold * table[0, Field.LENGTH] + place
    assert (places >= 0).sum() == 6
    _, table = entries_of(Part(Rows(0, 1, 3, 3, 2), Heads(2, 1, 0, 1, 1), out, None), 32)
    assert (table[:, Field.PLACES] == 0).all()


@pytest.mark.parametrize(
    ("rows", "apart", "divisor"),
    [
        (Rows(0, 4, 2), 32, 4),
        (Rows(0, 6, 2), 32, 2),
        (Rows(0, 64, 2, 96, 3), 32, 32),
        (Rows(0, 8, 2, 12, 3), 32, 4),
    ],
)
def test_what_divides_the_steps_of_a_grid(rows: Rows, apart: int, divisor: int) -> None:
    out = torch.empty(rows.folds, 1, 1, 1, rows.length, D)
    _, table = entries_of(Part(rows, Heads(1, 1, 0, 1, 1), out, None), apart)
    assert table[0, Field.DIVISOR] == divisor
