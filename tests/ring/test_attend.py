"""The kernel of a call on a GPU, chosen without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring.attend import _merges_in_one_pass, accumulator_for, sum_class_for
from ring.compute.accumulator import Accumulator, Sum
from ring.compute.part_sums import PartSum
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Leaf, Node, SumTree


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "heads", "combined"),
    [
        *(("cuda", dtype, 1, 1, True) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        ("cuda", torch.float64, 1, 1, False), ("cpu", torch.float32, 1, 1, False), ("meta", torch.float32, 1, 1, False),
        # What cannot be counted in 32 bits is merged by the plain version.
        ("cuda", torch.bfloat16, 2**30, 1, True), ("cuda", torch.bfloat16, 2**25, 32, True),
        ("cuda", torch.bfloat16, 2**25 + 1, 32, False), ("cuda", torch.bfloat16, 2**31, 1, False),
    ],
)  # fmt: skip
def test_partial_results_are_combined_in_one_pass(
    device: str, dtype: torch.dtype, tokens: int, heads: int, combined: bool
) -> None:
    x: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, tokens, heads, 8))
    assert _merges_in_one_pass(x) is combined
    if not combined:
        assert isinstance(accumulator_for(x, None), Accumulator) and sum_class_for(x) is Sum


def test_parts_are_added_in_the_accumulator_dtype() -> None:
    tree, sums = SumTree(Rows(0, 1, 1), Heads(1, 1, 0, 1, 1), 2, 0, True), PartSum()
    for number, value in enumerate((1.0, 2.0**-9)):
        sums.add(Leaf(tree, number, 0), torch.full((1, 1, 1, 1, 1, 1), value, dtype=torch.bfloat16))
    assert sums.take(tree, Node(1, 0)).item() == 1.0 + 2.0**-9
