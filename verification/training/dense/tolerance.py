"""How far a run may be from the dense one.

In fp64 there is one threshold, THRESHOLD times the largest number of a quantity: it lies in the wide gap between what
rounding does and what the smallest defect does, which every run records (`verification.training.deviations`).

In lower precisions the scale of what rounding may do is estimated: the dense computation is repeated DRAWS times, with
every number that the precision rounds changed by up to its last bit, forward and backward. FACTOR times the root of the
mean square of the largest deviation is allowed, and FACTOR times the last bit of the largest number of the quantity:
what is small, or 0, may have been left over by large numbers that cancel.
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
Allowed = dict[str, dict[str, float]]  # by quantity and name


def allowed_deviations(case: TrainingCase, exact: TrainingResult) -> Allowed:
    """The largest |seen - exact| that is allowed, by quantity and name. 0 where all of a quantity is 0."""
    if case.dtype == "float64":
        return {
            quantity: dict.fromkeys(named, THRESHOLD * largest(named)) for quantity, named in exact.quantities().items()
        }
    scale = rounding_scale(case, exact)
    unit = UNIT_ROUNDOFF[case.dtype]
    return {
        quantity: {name: FACTOR * (scale[quantity][name] + unit * largest(named)) for name in named}
        for quantity, named in exact.quantities().items()
    }


def rounding_scale(case: TrainingCase, exact: TrainingResult) -> Allowed:
    """By quantity and name, the root mean square over the draws of the largest deviation in a draw."""
    squares = {quantity: dict.fromkeys(named, 0.0) for quantity, named in exact.quantities().items()}
    kept = UNIT_ROUNDOFF["float32"]
    for draw in range(DRAWS):
        seed = case.seed * DRAWS + draw
        drawn = train_densely(case, noise(UNIT_ROUNDOFF[case.dtype], seed), noise(kept, seed))
        for quantity, named in drawn.quantities().items():
            for name, x in named.items():
                squares[quantity][name] += size(x - exact.quantities()[quantity][name]) ** 2 / DRAWS
    return {quantity: {name: math.sqrt(x) for name, x in named.items()} for quantity, named in squares.items()}


def largest(named: Named) -> float:
    return max((size(x) for x in named.values()), default=0.0)


def size(x: Tensor) -> float:
    """The largest |entry|, 0 where there is none."""
    return float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0
