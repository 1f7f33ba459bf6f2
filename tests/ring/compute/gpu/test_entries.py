"""The table of the merge kernel, checked without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring.compute.gpu.entries import Field, entries_of
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
