"""What computes a call on a GPU, chosen without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.walk import _combines, accumulator_for, sums_of


def like(device: str, dtype: torch.dtype, tokens: int = 1, heads: int = 1) -> Any:
    """No GPU is needed to ask."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, tokens, heads, 8))


@pytest.mark.parametrize("device, combined", [("cpu", False), ("cuda", True), ("meta", False)])
def test_partial_results_are_combined_on_gpus_but_for_fp64(device: str, combined: bool) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert _combines(like(device, dtype)) is (combined and dtype is not torch.float64)


@pytest.mark.parametrize(
    ("tokens", "heads", "combined"),
    [(2**30, 1, True), (2**25, 32, True), (2**25 + 1, 32, False), (2**31, 1, False)],
)
def test_what_cannot_be_counted_in_32_bits_is_merged_by_the_plain_version(
    tokens: int, heads: int, combined: bool
) -> None:
    x = like("cuda", torch.bfloat16, tokens, heads)
    assert _combines(x) is combined
    if not combined:
        assert isinstance(accumulator_for(x), Accumulator) and sums_of(x) is Sum
