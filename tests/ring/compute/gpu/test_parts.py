"""Which partial results become outputs and which the GPU's merge kernel takes, and its table; checked without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ring.compute.gpu.entries import Field, entries_of, places_of
from ring.compute.gpu.parts import Part, as_output, is_aligned, takes_part
from ring.plan.blocks import Heads
from ring.plan.rows import Rows

B, N, H, D = 2, 12, 6, 8
LIKE = torch.empty(B, N, H, D, dtype=torch.bfloat16)
LISTED = Rows.of(np.array([[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]))


def part_of(memory: torch.Tensor, folds: int, per_group: int) -> Part:
    """A (B, N, H, D) tensor as the tile of a call that takes all of it."""
    length, groups = N // folds, H // per_group
    tile = memory.view(B, folds, length, groups, per_group, D).permute(1, 0, 3, 4, 2, 5)
    return Part(Rows(0, 1, length, length, folds), Heads(groups, per_group, 0, per_group, 1), tile, None)


@pytest.mark.parametrize("folds", (1, 3))
@pytest.mark.parametrize("per_group", (1, 2, 6))
def test_a_part_that_covers_everything_is_an_output(folds: int, per_group: int) -> None:
    memory = torch.randn(B, N, H, D).bfloat16()
    found = as_output(part_of(memory, folds, per_group), LIKE, torch.bfloat16)
    assert found is not None and found.data_ptr() == memory.data_ptr() and torch.equal(found, memory)


def test_parts_that_are_no_output_or_not_for_the_merge_kernel() -> None:
    part = part_of(torch.randn(B, N, H, D).bfloat16(), 3, 2)
    by_head = torch.randn(B, H, N, D).bfloat16().transpose(1, 2).unflatten(1, (3, 4)).unflatten(3, (3, 2))
    others = {
        "another type": replace(part, out=part.out.float()),
        "rows from the second on": replace(part, rows=replace(part.rows, start=1)),
        "every other row": replace(part, rows=Rows(0, 2, 4, 4, 3)),
        "segments in another order": replace(part, rows=LISTED),
        "rows that go by the head": replace(part, rows=replace(part.rows, head_step=1)),
        "heads the other way round": replace(part, heads=Heads.of(((4, 5), (2, 3), (0, 1)))),
        "among others in memory": part_of(torch.randn(2, B, N, H, D).bfloat16()[0], 3, 2),
        "laid out by heads": replace(part, out=by_head.permute(1, 0, 3, 4, 2, 5)),
        "fewer rows": replace(part, rows=Rows(0, 1, 4, 4, 2), out=part.out[:2]),
    }
    assert {name for name, one in others.items() if as_output(one, LIKE, torch.bfloat16) is not None} == set()
    assert takes_part(part.rows, part.heads, part.out) and takes_part(LISTED, part.heads, part.out)
    assert not takes_part(part.rows, Heads.of(((0, 3), (1, 4), (2, 6))), part.out), "heads that are listed"
    assert not takes_part(part.rows, part.heads, part.out.transpose(4, 5)), "numbers that do not lie side by side"
    assert not takes_part(Rows(0, 3, 4, 1, 3), part.heads, part.out), "folds that lie between each other"
    x = torch.empty(4, 3, 16, dtype=torch.bfloat16)
    assert is_aligned(x[1:, 2:]) and is_aligned(x[:, :, 8:]) and not is_aligned(x[:, :, 4:])
    assert is_aligned(x[:1, 0, :12]) and not is_aligned(torch.empty(2, 2, 12, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("rows", "divisor"), [(Rows(5, 3, 4, 20, 2, head_step=1), 1), (Rows(0, 8, 4, 44, 2), 4), (LISTED, 1)]
)
def test_an_entry_for_each_head_finds_every_row(rows: Rows, divisor: int) -> None:
    """Numbers at the addresses are what `Rows` and `Heads` say: read back as the kernel does."""
    out = torch.arange(rows.folds * B * 3 * 2 * 4 * D, dtype=torch.float32).view(rows.folds, B, 3, 2, 4, D)
    lse, listed = out[..., 0].contiguous(), rows.listed()
    heads, table = entries_of(Part(rows, Heads(3, 2, 1, 4, 2), out, lse), 32)
    assert heads.tolist() == [1, 3, 5, 7, 9, 11] and (table[:, [Field.IS_FP32, Field.DIVISOR]] == [1, divisor]).all()
    places = places_of(rows, out.device)
    assert (table[:, Field.PLACES] == (places.data_ptr() if rows.index is not None else 0)).all()
    for entry, (group, member) in zip(table, np.ndindex(3, 2), strict=True):
        on = group * rows.head_step
        assert (entry[Field.START], entry[Field.END]) == (listed.min() + on, listed.max() + on + 1)
        for f, b, i in np.ndindex(rows.folds, B, 4):
            if rows.index is None:
                row = entry[Field.START] + f * entry[Field.FOLD_STEP] + i * entry[Field.STEP]
                assert row == listed[f, i] + on
            else:
                assert places[listed[f, i] - listed.min()] == f * entry[Field.LENGTH] + i
            at = f * entry[Field.OUT_FOLD] + b * entry[Field.OUT_BATCH] + i * entry[Field.OUT_ROW]
            assert out.view(-1)[entry[Field.OUT] // 4 + at] == out[f, b, group, member, i, 0]
            at = f * entry[Field.LSE_FOLD] + b * entry[Field.LSE_BATCH] + i * entry[Field.LSE_ROW]
            assert lse.view(-1)[entry[Field.LSE] // 4 + at] == lse[f, b, group, member, i]
