"""A row of a tile has the same bits whatever the scores of other rows are."""

from __future__ import annotations

import pytest
import torch

from ring.compute import kernels
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Tile


@pytest.mark.parametrize("name", ["math", "flash"])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name: str) -> None:
    """A row with a single score of 0 has lse 0, as a row of -inf by the fused kernel, and is computed again by the
    plain one; the rows beside it, of the same fold and of others, are not."""
    rows, heads = Rows(0, 1, 20, 20, 2), Heads(1, 1, 0, 1, 1)
    tile = Tile(rows, rows, heads, heads, Mask.CAUSAL)
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 1, 1, 20, 8, generator=made, dtype=torch.float64) for _ in range(3))
    before = kernels.forward(name, q, k, v, tile, 1.0)
    q[1, ..., 0, :] = 0.0
    after = kernels.forward(name, q, k, v, tile, 1.0)
    assert (after[1][1, ..., 0] == 0).all()
    for a, b in zip(before, after, strict=True):
        assert a[0].equal(b[0]) and a[1, :, :, :, 1:].equal(b[1, :, :, :, 1:])
