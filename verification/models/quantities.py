"""Comparison of the ranks' results with those of the one process, and the properties that it makes up.

A check takes a StepCase, its Expectation and the Results of each rank, in rank order. It returns the worst ratio
(deviation / allowed) by quantity, or an empty dict if the check is exact. It raises WrongResult.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from verification.check.properties import Property, run_checks
from verification.failures import WrongResult
from verification.models.results import FIRST, Array, Expectation, Results
from verification.models.step_case import StepCase

Ratios = dict[str, float]
Check = Callable[[Any, Any, Any], Ratios]


def check_quantity(
    quantity: str, case: StepCase, expectation: Expectation, observations: Sequence[Results],
    *, later: bool | None = None,
) -> Ratios:  # fmt: skip
    """Check |actual - exact| <= allowed for all entries of a quantity on every rank. later: True selects the steps
    after the first, False the first step, None all."""
    worst = 0.0
    for rank, observation in enumerate(observations):
        for name, actual, exact, allowed in _pairs(quantity, expectation, observation):
            if later is not None and later == (name == FIRST):
                continue
            where = f"{quantity}: {name} on {label_rank(case, rank)}"
            if actual is None or exact is None:
                raise WrongResult(f"{where} is {'missing' if actual is None else 'not expected'}", quantity, np.inf)
            if actual.shape != exact.shape:
                raise WrongResult(f"{where} has shape {actual.shape}, not {exact.shape}", quantity, np.inf)
            ratio = _ratio(actual, exact, allowed)
            if not (ratio <= 1.0).all():
                raise WrongResult(f"{where} {_worst(actual, exact, allowed)}", quantity, float(np.max(ratio)))
            worst = max(worst, float(ratio.max(initial=0.0)))
    return {quantity: worst}


QUANTITY_CHECKS: dict[str, Check] = {  # causes before effects
    "logits": partial(check_quantity, "logits"),
    "first loss": partial(check_quantity, "losses", later=False),
    "gradients": partial(check_quantity, "gradients"),
    "first norm": partial(check_quantity, "norms", later=False),
    "later losses": partial(check_quantity, "losses", later=True),
    "later norms": partial(check_quantity, "norms", later=True),
    "parameters": partial(check_quantity, "parameters"),
}


def quantity_properties(gradients: str) -> tuple[Property, ...]:
    """Return the properties that these checks make up. gradients: title of that of gradients."""
    return (
        Property("logits", ("logits",)),
        Property("loss of step one", ("first loss",)),
        Property(gradients, ("gradients",)),
        Property("norm of the gradients", ("first norm",), concerns=lambda case: case.clipping is not None),
        Property("losses, norms of later steps", ("later losses", "later norms"), concerns=lambda case: case.steps > 1),
        Property("parameters after the last", ("parameters",)),
    )


def check_results(
    properties: Sequence[Property], checks: Mapping[str, Check], case: StepCase, expectation: Expectation,
    observations: Sequence[Results],
) -> Ratios:  # fmt: skip
    """Return the worst ratio (deviation / allowed) of each property by title; 0 is exact. Raises the first failure: its
    `broken` is the property's title, and its message lists the worst ratio of every quantity."""
    try:
        return run_checks(properties, checks, case, expectation, observations)
    except WrongResult as failure:
        worst = deviations(expectation, observations)
        listed = ", ".join(f"{quantity} {ratio:.3g}" for quantity, ratio in worst.items())
        error = WrongResult(f"{failure}\nworst deviations / allowed: {listed}", failure.quantity, max(worst.values()))
        error.broken = failure.broken
        raise error from None


def deviations(expectation: Expectation, observations: Sequence[Results]) -> Ratios:
    """Return the worst ratio of each quantity without raising; infinite for a missing, extra or non-finite entry."""
    ratios = {}
    for quantity in expectation.exact:
        pairs = [pair for observation in observations for pair in _pairs(quantity, expectation, observation)]
        worst = [
            np.inf if a is None or b is None or a.shape != b.shape else np.max(_ratio(a, b, allowed), initial=0.0)
            for _, a, b, allowed in pairs
        ]
        ratios[quantity] = float(np.nan_to_num(np.max(worst, initial=0.0), nan=np.inf))
    return ratios


def _pairs(
    quantity: str, expectation: Expectation, observation: Results
) -> Iterator[tuple[str, Array | None, Array | None, float]]:
    """Yield (name, actual, exact, allowed) for each entry of a quantity that the rank has or must have."""
    named, expected = getattr(observation, quantity), expectation.exact[quantity]
    for name in dict.fromkeys((*expected, *named)):
        exact = expected.get(name)
        if exact is not None and quantity == "logits":
            exact = exact[observation.data_rank]
        yield name, named.get(name), exact, expectation.allowed[quantity].get(name, 0.0)


def _ratio(actual: Array, exact: Array, allowed: float) -> Array:
    """Deviation of each entry as a fraction of the allowed one."""
    error = np.abs(actual.astype(np.float64) - exact)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(error == 0.0, 0.0, error / allowed)


def _worst(actual: Array, exact: Array, allowed: float) -> str:
    ratio = _ratio(actual, exact, allowed)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio))), ratio.shape)
    where = f" at {tuple(map(int, at))}" if at else ""
    return (
        f"is {actual[at]}{where}, expected {exact[at]}: deviation {abs(actual[at] - exact[at]):.3g} is {ratio[at]:.3g} "
        f"times the allowed {allowed:.3g}; {int((~(ratio <= 1.0)).sum())} of {ratio.size} entries deviate by more"
    )


def label_rank(case: StepCase, rank: int) -> str:
    data, index = case.coordinates(rank)
    return f"rank {rank} (data {data}, context {index})"
