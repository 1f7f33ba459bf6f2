"""Which partial results become outputs, and which memory allows wide loads; checked without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ring.compute.accumulator import Accumulator
from ring.compute.gpu.parts import Part, as_output, is_aligned, takes_part, whole
from ring.plan.blocks import Heads
from ring.plan.rows import Rows

B, N, H, D = 2, 12, 6, 8
LIKE = torch.empty(B, N, H, D, dtype=torch.bfloat16)


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


def test_a_part_that_is_no_output() -> None:
    part = part_of(torch.randn(B, N, H, D).bfloat16(), 3, 2)
    rows, heads = part.rows, part.heads
    shared = torch.randn(2, B, N, H, D).bfloat16()
    by_head = torch.randn(B, H, N, D).bfloat16().transpose(1, 2).unflatten(1, (3, 4)).unflatten(3, (3, 2))
    others = {
        "another type": replace(part, out=part.out.float()),
        "rows from the second on": replace(part, rows=replace(rows, start=1)),
        "every other row": replace(part, rows=Rows(0, 2, 4, 4, 3)),
        "segments in another order": replace(
            part, rows=Rows.of(np.array([[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]))
        ),
        "rows that go by the head": replace(part, rows=replace(rows, head_step=1)),
        "heads the other way round": replace(part, heads=Heads.of(((4, 5), (2, 3), (0, 1)))),
        "every third head": replace(part, heads=Heads.of(((0, 3), (1, 4), (2, 5)))),
        "among others in memory": part_of(shared[0], 3, 2),
        "laid out by heads": replace(part, out=by_head.permute(1, 0, 3, 4, 2, 5)),
    }
    assert as_output(part, LIKE, torch.bfloat16) is not None
    for name, other in others.items():
        assert other.out.shape == part.out.shape
        assert as_output(other, LIKE, torch.bfloat16) is None, name
    fewer = torch.empty(B, N - 4, H, D, dtype=torch.bfloat16)
    assert as_output(part, fewer, torch.bfloat16) is None
    assert as_output(replace(part, rows=Rows(0, 1, 4, 4, 2), out=part.out[:2]), LIKE, torch.bfloat16) is None
    assert heads.groups * heads.per_group == H


def test_wide_loads_want_every_row_to_begin_at_16_bytes() -> None:
    x = torch.empty(4, 3, 16, dtype=torch.bfloat16)
    assert is_aligned(x) and is_aligned(x[1:, 2:]) and is_aligned(x[:, :, 8:])
    assert not is_aligned(x[:, :, 4:]) and not is_aligned(torch.empty(4, 3, 12, dtype=torch.bfloat16))
    assert is_aligned(torch.empty(1, 12, dtype=torch.bfloat16)), "one row begins where the tensor does"
    padded = torch.empty(2, 2, 12, dtype=torch.bfloat16)
    assert padded.stride(0) % 8 == 0 and not is_aligned(padded), "batches begin at 16 bytes, rows do not"


def test_a_sum_is_one_part_of_all_rows_and_heads() -> None:
    plain = Accumulator(torch.empty(B, N, H, D))
    plain.out.copy_(torch.randn(B, N, H, D))
    plain.lse.copy_(torch.randn(B, H, N))
    part = whole(plain)
    assert part.rows.listed().tolist() == [list(range(N))]
    assert part.heads.listed() == tuple((head,) for head in range(H))
    assert part.out.shape == (1, B, H, 1, N, D) and part.lse is not None and part.lse.shape == (1, B, H, 1, N)
    assert torch.equal(part.out[0, :, :, 0].transpose(1, 2), plain.out) and torch.equal(part.lse[0, :, :, 0], plain.lse)


def test_which_tiles_the_merge_kernel_takes() -> None:
    part = part_of(torch.randn(B, N, H, D).bfloat16(), 3, 2)
    listed = Rows.of(np.array([[4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]))
    assert takes_part(part.rows, part.heads, part.out) and takes_part(listed, part.heads, part.out)
    assert not takes_part(part.rows, Heads.of(((0, 3), (1, 4), (2, 5), (6, 8))), part.out), "heads that are listed"
    assert not takes_part(part.rows, part.heads, part.out.transpose(4, 5)), "numbers that do not lie side by side"
    assert not takes_part(Rows(0, 3, 4, 1, 3), part.heads, part.out), "folds that lie between each other"
