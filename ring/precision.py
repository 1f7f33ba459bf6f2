"""The dtype of accumulators."""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, lse, merges and gradient sums: fp32, or fp64 for fp64 inputs; never 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32
