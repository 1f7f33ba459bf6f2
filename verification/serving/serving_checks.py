"""Checks of serving, one small function each, and the properties that a report lists.

A check takes a ServingCase, its ServingExpectation and one ServingObservation per rank. It returns the worst error as a
fraction of its bound, by quantity, or raises WrongResult with the place of the first error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
            raise WrongResult(
                f"answers: {name} of rank {rank} in call {number} is {dtype}, not {' or '.join(sorted(allowed))}"
            )
    return {}


def check_inputs(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """Queries, keys and values are unchanged, bit for bit."""
    for rank, observation in enumerate(observations):
        if observation.spoilt:
            raise WrongResult(f"inputs: changed on rank {rank} in call {observation.spoilt[0]}")
    return {}


def check_unseen(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """A query that sees no key of a rank has exactly 0 and -inf there."""
    for number, rank, name, actual in _results(observations):
        if name.startswith("partial"):
            unseen = expectation.exact[number][rank]["partial_lse"] == -np.inf
            exact = expectation.exact[number][rank][name]
            wrong = (actual != exact) & (unseen if name.endswith("lse") else unseen[..., None])
            if wrong.any():
                where = tuple(map(int, np.argwhere(wrong)[0]))
                raise WrongResult(
                    f"unseen: {name} is {actual[where]} {_place(case, expectation, number, rank, where)}, not exactly "
                    f"{exact[where]}: the query sees no key of the rank",
                    name,
                )
    return {}


def check_finite(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """No result is NaN or infinite, except: -inf where a query sees no key of a rank, overflow, an infinite bound."""
    for number, rank, name, actual in _results(observations):
        wrong = ~(np.isfinite(actual) | _accepted(case, expectation, number, rank, name, actual))
        if wrong.any():
            where = tuple(map(int, np.argwhere(wrong)[0]))
            exact = expectation.exact[number][rank][name][where]
            place = _place(case, expectation, number, rank, where)
            raise WrongResult(f"finite: {name} is {actual[where]} {place}, expected {exact}", name)
    return {}


def check_partials(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """Output and log-sum-exp over the keys that a rank owns are within their bounds, in every entry."""
    return _within_bounds(case, expectation, observations, ("partial_out", "partial_lse"))


def check_merged(case: ServingCase, expectation: ServingExpectation, observations: Observations) -> Ratios:
    """Output and log-sum-exp over the keys of all ranks are within their bounds, in every entry on every rank."""
    return _within_bounds(case, expectation, observations, ("out", "lse"))


def _results(observations: Observations) -> Iterator[tuple[int, int, str, Floats]]:
    """Yield (call, rank, name, result), earlier calls first."""
    for number, results in enumerate(zip(*(x.results for x in observations), strict=True)):
        for rank, named in enumerate(results):
            yield from ((number, rank, name, actual) for name, actual in named.items())


def _within_bounds(
    case: ServingCase, expectation: ServingExpectation, observations: Observations, names: tuple[str, ...]
) -> Ratios:
    worst: Ratios = {}
    for number, rank, name, actual in _results(observations):
        if name not in names:
            continue
        ratio, error = deviation(case, expectation, number, rank, name, actual)
        if not (ratio <= 1.0).all():
            where = worst_entry(ratio)
            exact, bound = expectation.exact[number][rank][name], expectation.bound[number][rank][name]
            raise WrongResult(
                f"values: {name} is {actual[where]} {_place(case, expectation, number, rank, where)}, expected "
                f"{exact[where]}: error {error[where]:.3g} is {ratio[where]:.3g} times its bound {bound[where]:.3g}; "
                f"{int((~(ratio <= 1.0)).sum())} of {ratio.size} entries exceed theirs",
                name,
                float(ratio[where]),
            )
        worst[name] = max(worst.get(name, 0.0), float(ratio.max(initial=0.0)))
    return worst


def deviation(
    case: ServingCase, expectation: ServingExpectation, number: int, rank: int, name: str, actual: Floats
) -> tuple[Array, Array]:
    """Return error / bound, and the error, of each entry. 0 where a result that is not finite is accepted."""
    exact, bound = expectation.exact[number][rank][name], expectation.bound[number][rank][name]
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(_accepted(case, expectation, number, rank, name, actual), 0.0, np.abs(actual - exact))
        return np.where(error == 0.0, 0.0, error / bound), error


def _accepted(
    case: ServingCase, expectation: ServingExpectation, number: int, rank: int, name: str, actual: Floats
) -> Array:
    """Return True where a result is the exact one, may be anything, or overflows as it may."""
    exact, bound = expectation.exact[number][rank][name], expectation.bound[number][rank][name]
    with np.errstate(invalid="ignore"):
        overflow = np.isinf(actual) & np.isfinite(exact) & (np.abs(exact) + bound > LARGEST[case.dtype])
    accepted: Array = (actual == exact) | np.isinf(bound) | overflow
    return accepted


def _place(case: ServingCase, expectation: ServingExpectation, number: int, rank: int, where: tuple[int, ...]) -> str:
    slot, position = expectation.places[number][where[0]]
    dim = f", dim {where[2]}" if len(where) > 2 else ""
    return f"at position {position} of slot {slot}, head {where[1]}{dim}, in call {number} on rank {rank}"


# Checks in the order in which they are made: causes before effects.
SERVING_CHECKS: dict[str, Check] = {
    "answers": check_answers,
    "inputs": check_inputs,
    "unseen": check_unseen,
    "finite": check_finite,
    "partials": check_partials,
    "merged": check_merged,
}
SERVING_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("types, shapes, finite", ("answers", "finite")),
    Property("inputs intact", ("inputs",)),
    Property("no key on a rank: 0, -inf", ("unseen",)),
    Property("results of each rank's keys", ("partials",)),
    Property("merged results", ("merged",)),
)
