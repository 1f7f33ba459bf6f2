"""Checks of serving, one small function each, and the properties that a report lists.

A check takes a ServingCase, its ServingExpectation and one ServingObservation per rank. It returns the worst error as a
fraction of its bound, by quantity, or raises WrongResult with the place of the worst error of the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from verification.serving.serving_rank import ServingObservation

Ratios = dict[str, float]
Observations = Sequence[ServingObservation]
Check = Callable[[ServingCase, ServingExpectation, Observations], Ratios]


def check_answers(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """Results have the types that the inputs imply: out q's, a partial one also fp32, lse fp32 (fp64 for fp64)."""
    wide = "float64" if case.dtype == "float64" else "float32"
    for number, rank, name, _ in _results(observations):
        allowed = {wide} if name.endswith("lse") else {case.dtype, wide} if name == "partial_out" else {case.dtype}
        dtype = observations[rank].dtypes[number][name]
        if dtype not in allowed:
            must = " or ".join(sorted(allowed))
            raise WrongResult(f"answers: {name} of rank {rank} in call {number} is {dtype}, not {must}")
    return {}


def check_inputs(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """Queries, keys and values are unchanged, bit for bit."""
    for rank, observation in enumerate(observations):
        if observation.spoilt:
            raise WrongResult(f"inputs: changed on rank {rank} in call {observation.spoilt[0]}")
    return {}


def _within_bounds(
    names: tuple[str, ...], case: ServingCase, expectation: ServingExpectation, observations: Observations
) -> Ratios:
    """These results are within their bounds, in every entry; where a query sees no key exactly 0 and -inf."""
    worst: Ratios = {}
    for number, rank, name, actual in _results(observations):
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


def _results(observations: Observations) -> Iterator[tuple[int, int, str, Floats]]:
    """Yield (call, rank, name, result), earlier calls first."""
    for number, results in enumerate(zip(*(x.results for x in observations), strict=True)):
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


# Checks in the order in which they are made: causes before effects.
SERVING_CHECKS: dict[str, Check] = {
    "answers": check_answers,
    "inputs": check_inputs,
    "partials": partial(_within_bounds, ("partial_out", "partial_lse")),
    "merged": partial(_within_bounds, ("out", "lse")),
}
SERVING_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("types of results", ("answers",)),
    Property("inputs intact", ("inputs",)),
    Property("results of each rank's keys", ("partials",)),
    Property("merged results", ("merged",)),
)
