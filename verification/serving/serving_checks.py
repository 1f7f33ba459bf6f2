"""Checks of the results of servers, and the properties that a report lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from reference.bounds import Array
from reference.roundoff import LARGEST
from verification.check.properties import EVERY_RANK_ANSWERS, Property
from verification.check.worst_entry import worst_entry
from verification.failures import WrongResult
from verification.run.observation import Floats
from verification.serving.expected import ServingExpectation
from verification.serving.serving_case import ServingCase
from verification.serving.serving_rank import Results

Ratios = dict[str, float]
Observations = Sequence[Results]  # by rank


def _within_bounds(
    names: tuple[str, ...], case: ServingCase, expectation: ServingExpectation, observations: Observations
) -> Ratios:
    """Return the worst error / bound of these results; where a query sees no key, they must be exactly 0 and -inf.
    Raise WrongResult with the place of the worst error of the first wrong one."""
    worst: Ratios = {}
    for number, rank, name, actual in in_order(observations):
        if name not in names:
            continue
        ratio = deviation(case, expectation, number, rank, name, actual)
        if not (ratio <= 1.0).all():
            where = worst_entry(ratio)
            exact, bound = (by[number][rank][name][where] for by in (expectation.exact, expectation.bound))
            slot, position = expectation.places[number][where[0]]
            dim = f", dim {where[2]}" if len(where) > 2 else ""
            unseen = name.startswith("partial") and expectation.exact[number][rank]["partial_lse"][where[:2]] == -np.inf
            reason = ": the query sees no key of the rank" if unseen else f": error / bound is {ratio[where]:.3g}"
            raise WrongResult(
                f"values: {name} is {actual[where]} at position {position} of slot {slot}, head {where[1]}{dim}, in "
                f"call {number} on rank {rank}, expected {exact} within {bound:.3g}{reason}; "
                f"{int((~(ratio <= 1.0)).sum())} of {ratio.size} entries exceed their bounds",
                name,
                float(ratio[where]),
            )
        worst[name] = max(worst.get(name, 0.0), float(ratio.max(initial=0.0)))
    return worst


def in_order(observations: Observations) -> Iterator[tuple[int, int, str, Floats]]:
    """Yield (call, rank, name, result), earlier calls first."""
    for number, results in enumerate(zip(*observations, strict=True)):
        for rank, named in enumerate(results):
            yield from ((number, rank, name, actual) for name, actual in named.items())


def deviation(
    case: ServingCase, expectation: ServingExpectation, number: int, rank: int, name: str, actual: Floats
) -> Array:
    """Return error / bound of each entry; 0 for what is exact, may be anything, or overflows as it may."""
    exact, bound = (by[number][rank][name] for by in (expectation.exact, expectation.bound))
    with np.errstate(invalid="ignore", divide="ignore"):
        overflow = np.isinf(actual) & np.isfinite(exact) & (np.abs(exact) + bound > LARGEST[case.dtype])
        ratio: Array = np.where((actual == exact) | np.isinf(bound) | overflow, 0.0, np.abs(actual - exact) / bound)
    return ratio


SERVING_CHECKS = {  # in the order in which they are made: causes before effects
    "partials": partial(_within_bounds, ("partial_out", "partial_lse")),
    "merged": partial(_within_bounds, ("out", "lse")),
}
SERVING_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("results of each rank's keys", ("partials",)),
    Property("merged results", ("merged",)),
)
