"""Allowed deviations of a run from the dense one.

In fp64 the threshold is THRESHOLD times the largest entry of a quantity. It lies in the wide gap between rounding and
the smallest defect, which every run records (`verification.training.error_histogram`).

In lower precisions the effect of rounding is estimated. The dense computation is repeated DRAWS times, with every
rounded number changed by up to its last bit, forward and backward. The allowed deviation is FACTOR times the root mean
square of the largest deviation, plus FACTOR times the last bit of the quantity's largest entry, since a small entry
may be the difference of large numbers.

Models with norms that may be steps (`Model.has_steps`) get the larger of both in fp64. A layer norm multiplies a small
change by up to 1 / sqrt(eps), and several in sequence have amplified the last bit to 4e-9.
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
# Factor on the last bit: fp64 cannot represent smaller changes, so it is changed by more, and the effect divided by the
# same factor.
MAGNIFIED = {"float64": 2.0**10, "float32": 1.0, "bfloat16": 1.0}
Allowed = dict[str, dict[str, float]]  # by quantity and name


def allowed_deviations(case: TrainingCase, exact: TrainingResult) -> Allowed:
    """Largest allowed |actual - exact| by quantity and name; 0 if a whole quantity is 0."""
    quantities, fp64 = exact.quantities(), case.dtype == "float64"
    threshold = {quantity: THRESHOLD * largest(named) if fp64 else 0.0 for quantity, named in quantities.items()}
    if fp64 and not case.model.has_steps:
        return {quantity: dict.fromkeys(named, threshold[quantity]) for quantity, named in quantities.items()}
    scale, unit = rounding_scale(case, exact), UNIT_ROUNDOFF[case.dtype]
    return {
        quantity: {
            name: max(threshold[quantity], FACTOR * (scale[quantity][name] + unit * largest(named))) for name in named
        }
        for quantity, named in quantities.items()
    }


def rounding_scale(case: TrainingCase, exact: TrainingResult) -> Allowed:
    """Root mean square over the draws of the largest deviation in a draw, by quantity and name."""
    squares = {quantity: dict.fromkeys(named, 0.0) for quantity, named in exact.quantities().items()}
    magnified, stored_dtype = MAGNIFIED[case.dtype], "float64" if case.dtype == "float64" else "float32"
    for draw in range(DRAWS):
        seed = case.seed * DRAWS + draw
        rounded, stored = (noise(magnified * UNIT_ROUNDOFF[dtype], seed) for dtype in (case.dtype, stored_dtype))
        drawn = train_densely(case, rounded, stored)
        for quantity, named in drawn.quantities().items():
            for name, x in named.items():
                deviation = size(x - exact.quantities()[quantity][name]) / magnified
                squares[quantity][name] += deviation**2 / DRAWS
    return {quantity: {name: math.sqrt(x) for name, x in named.items()} for quantity, named in squares.items()}


def largest(named: Named) -> float:
    return max((size(x) for x in named.values()), default=0.0)


def size(x: Tensor) -> float:
    """Largest |entry|; 0 for an empty tensor."""
    return float(torch.linalg.vector_norm(x, math.inf)) if x.numel() else 0.0
