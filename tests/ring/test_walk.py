"""What computes a call on a GPU, chosen without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring.compute.accumulator import Accumulator, Sum
from ring.walk import _combines, accumulator_for, sums_of


@pytest.mark.parametrize(
    ("tokens", "heads", "device", "dtype", "in_one_pass"),
    [
        (2**30, 1, "cuda", torch.bfloat16, True),
        (2**25, 32, "cuda", torch.bfloat16, True),
        (2**25 + 1, 32, "cuda", torch.bfloat16, False),
        (2**31, 1, "cuda", torch.float32, False),
        (2**26, 32, "cuda", torch.float16, False),  # rows are counted in 32 bits, places of lse are not
        (1, 1, "cuda", torch.float64, False),
        (1, 1, "cpu", torch.bfloat16, False),
    ],
)
def test_what_cannot_be_counted_in_32_bits_is_merged_by_the_plain_version(
    tokens: int, heads: int, device: str, dtype: torch.dtype, in_one_pass: bool
) -> None:
    like: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, tokens, heads, 8))
    assert _combines(like) == in_one_pass
    if not in_one_pass:
        assert isinstance(accumulator_for(like), Accumulator) and sums_of(like) is Sum
