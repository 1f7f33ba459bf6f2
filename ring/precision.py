"""The type in which results are summed."""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, lse, merges and sums of gradients are kept in fp32, in fp64 for fp64 inputs; never in 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32
