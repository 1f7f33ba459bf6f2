"""Random changes of numbers by up to their last bit, forward and backward, as a lower precision rounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rounded = Callable[[Tensor], Tensor]
# Unit roundoff: half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}


def exact(x: Tensor) -> Tensor:
    """Return x, not rounded."""
    return x


def noise(unit: float, seed: int) -> Rounded:
    """Return a function that multiplies each number by 1 + e, and in backward each incoming gradient by 1 + e', with
    e, e' uniform in [-unit, unit]."""
    generator = torch.Generator().manual_seed(seed)

    def changed(x: Tensor) -> Tensor:
        factor = torch.rand(x.shape, dtype=x.dtype, generator=generator)
        return x * factor.mul_(2 * unit).add_(1 - unit)

    def rounded(x: Tensor) -> Tensor:
        out: Tensor = _Changed.apply(x, changed)
        return out

    return rounded


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, changed: Rounded) -> Tensor:
        ctx.changed = changed
        return changed(x)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
        return ctx.changed(incoming[0]), None
