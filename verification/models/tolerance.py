"""Allowed deviations of the ranks from the one process.

In fp64 the threshold is THRESHOLD times the largest entry of a quantity. It lies in the wide gap between rounding and
the smallest defect, which every run of `verification.training` records (`verification.training.error_histogram`).

In lower precisions the effect of rounding is estimated. The one process repeats its run DRAWS times, with every rounded
number changed by up to its last bit, forward and backward. The allowed deviation is FACTOR times the root mean square
of the largest deviation, plus FACTOR times the last bit of the quantity's largest entry, since a small entry may be the
difference of large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from verification.models.noise import UNIT_ROUNDOFF, Rounded, noise
from verification.models.results import Named, Results, largest, size
from verification.models.step_case import StepCase

THRESHOLD = 1e-9
DRAWS = 6
FACTOR = 16.0
# Factor on the last bit: fp64 cannot represent smaller changes, so it is changed by more, and the effect divided by the
# same factor.
MAGNIFIED = {"float64": 2.0**10, "float32": 1.0, "bfloat16": 1.0}
Allowed = Mapping[str, Mapping[str, float]]  # by quantity and name
# (rounded, stored) -> results of a run: rounded is applied to the numbers that the dtype rounds, stored to parameters
Train = Callable[[Rounded, Rounded], Results]


def allowed_deviations(case: StepCase, exact: Mapping[str, Named], train: Train, estimated: bool = False) -> Allowed:
    """Return the largest allowed |actual - exact| by quantity and name; 0 if a whole quantity is 0. estimated: use the
    larger of threshold and estimate in fp64 too."""
    fp64 = case.dtype == "float64"
    threshold = threshold_of(exact, THRESHOLD if fp64 else 0.0)
    if fp64 and not estimated:
        return threshold
    scale, unit = rounding_scale(case, exact, train), UNIT_ROUNDOFF[case.dtype]
    return {
        quantity: {
            name: max(threshold[quantity][name], FACTOR * (scale[quantity][name] + unit * largest(named)))
            for name in named
        }
        for quantity, named in exact.items()
    }


def threshold_of(exact: Mapping[str, Named], limit: float) -> Allowed:
    """Return that fraction of the largest entry of each quantity."""
    return {quantity: dict.fromkeys(named, limit * largest(named)) for quantity, named in exact.items()}


def rounding_scale(case: StepCase, exact: Mapping[str, Named], train: Train) -> Allowed:
    """Return the root mean square over the draws of the largest deviation in a draw, by quantity and name."""
    squares = {quantity: dict.fromkeys(named, 0.0) for quantity, named in exact.items()}
    magnified, stored = MAGNIFIED[case.dtype], "float64" if case.dtype == "float64" else "float32"
    for draw in range(DRAWS):
        seed = case.seed * DRAWS + draw
        drawn = train(*(noise(magnified * UNIT_ROUNDOFF[dtype], seed) for dtype in (case.dtype, stored))).quantities()
        for quantity, named in exact.items():
            for name, x in named.items():
                squares[quantity][name] += (size(drawn[quantity].get(name, 0.0) - x) / magnified) ** 2 / DRAWS
    return {quantity: {name: math.sqrt(x) for name, x in named.items()} for quantity, named in squares.items()}
