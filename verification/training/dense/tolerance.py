"""How far a run may be from the dense one.

In fp64 there is one threshold, THRESHOLD times the largest number of a quantity: it lies in the wide gap between what
rounding does and what the smallest defect does, which every run records (`verification.training.error_histogram`).

In lower precisions the scale of what rounding may do is estimated: the dense computation is repeated DRAWS times, with
every number that the precision rounds changed by up to its last bit, forward and backward. FACTOR times the root of the
mean square of the largest deviation is allowed, and FACTOR times the last bit of the largest number of the quantity:
what is small, or 0, may have been left over by large numbers that cancel.

So it is in fp64, beyond the threshold, where norms of the model may be steps (`Model.has_steps`). A layer norm
multiplies a small change by up to 1 / sqrt(eps), and several, one after the other, have made 4e-9 of the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verification.training.dense.dense_step import Named, TrainingResult, train_densely
from verification.training.dense.noise import UNIT_ROUNDOFF, noise
from verification.training.training_case import TrainingCase

THRESHOLD = 1e-9
DRAWS = 6
FACTOR = 16.0
# In fp64 numbers are changed by so many times their last bit, since there is nothing between a number and the next, and
# what that does is divided by it.
MAGNIFIED = {"float64": 2.0**10, "float32": 1.0, "bfloat16": 1.0}
Allowed = dict[str, dict[str, float]]  # by quantity and name


def allowed_deviations(case: TrainingCase, exact: TrainingResult) -> Allowed:
    """The largest |seen - exact| that is allowed, by quantity and name. 0 where all of a quantity is 0."""
    quantities, fp64 = exact.quantities(), case.dtype == "float64"
    least = {quantity: THRESHOLD * largest(named) if fp64 else 0.0 for quantity, named in quantities.items()}
    if fp64 and not case.model.has_steps:
        return {quantity: dict.fromkeys(named, least[quantity]) for quantity, named in quantities.items()}
    scale, unit = rounding_scale(case, exact), UNIT_ROUNDOFF[case.dtype]
    return {
        quantity: {
            name: max(least[quantity], FACTOR * (scale[quantity][name] + unit * largest(named))) for name in named
        }
        for quantity, named in quantities.items()
    }


def rounding_scale(case: TrainingCase, exact: TrainingResult) -> Allowed:
    """By quantity and name, the root mean square over the draws of the largest deviation in a draw."""
    squares = {quantity: dict.fromkeys(named, 0.0) for quantity, named in exact.quantities().items()}
    magnified, kept = MAGNIFIED[case.dtype], "float64" if case.dtype == "float64" else "float32"
    for draw in range(DRAWS):
        seed = case.seed * DRAWS + draw
        rounded, stored = (noise(magnified * UNIT_ROUNDOFF[dtype], seed) for dtype in (case.dtype, kept))
        drawn = train_densely(case, rounded, stored)
        for quantity, named in drawn.quantities().items():
            for name, x in named.items():
                deviation = size(x - exact.quantities()[quantity][name]) / magnified
                squares[quantity][name] += deviation**2 / DRAWS
    return {quantity: {name: math.sqrt(x) for name, x in named.items()} for quantity, named in squares.items()}


def largest(named: Named) -> float:
    return max((size(x) for x in named.values()), default=0.0)


def size(x: Tensor) -> float:
    """The largest |entry|, 0 where there is none."""
    return float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0
