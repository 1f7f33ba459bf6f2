"""The properties of one example that the report lists, each made of checks of `verification.check.checks`.

Causes come before their effects: a wrong shape before wrong numbers, an unmatched message before the excess bytes that
it causes. The oracle's property is about the judge, not the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.fast_oracle import Expectation
from verification.case import Case
from verification.check.checks import CHECKS, Ratios, costs
from verification.check.expectation import expect
from verification.check.oracle_agreement import is_compared, oracle_results
from verification.failures import VerificationFailure
from verification.run.observation import Observations


@dataclass(frozen=True)
class Property:
    """A title in the report, and the checks (names in CHECKS) that it stands for. concerns: True for Cases on which
    it is checked."""

    title: str
    checks: tuple[str, ...]
    concerns: Callable[[Any], bool] = lambda case: True

    def worst(self, ratios: dict[str, Ratios]) -> float:
        """Return the largest error / bound of its checks, 0 if they are exact; NaN is larger than any number."""
        return float(np.max([ratio for check in self.checks for ratio in ratios[check].values()], initial=0.0))


OF_THE_RANKS = tuple(name for name in CHECKS if name != "oracle")  # the others are about the judge

EVERY_RANK_ANSWERS = Property("every rank answers", ())  # broken by a crash, a hang or an exception
PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("oracle and its twin agree", ("oracle",), concerns=is_compared),
    Property("layout as defined", ("layout",)),
    Property("types, shapes, finite", ("answers", "finite")),
    Property("messages match", ("messages",)),
    Property("nothing selected: 0, -inf", ("unseen",)),
    Property("output and lse", ("values",)),
    Property("gradients", ("gradients",), concerns=lambda case: case.backward),
    Property("inputs intact, repeatable", ("inputs", "repeat")),
    Property("bytes sent", ("traffic",)),
    Property("buffers", ("buffers",)),
    Property("workspace of a call", ("workspace",), concerns=lambda case: case.measured),
)


# Checks that hold the ranks' results against exact ones: "answers" must have checked their shapes, and numbers can
# explain (`verification.causes`) failures of these alone.
OF_NUMBERS = {"unseen", "finite", "values", "gradients"}


def select_checks(titles: Collection[str]) -> tuple[str, ...]:
    """Return the checks of these properties, in the order in which they run."""
    names = {name for item in PROPERTIES if item.title in titles for name in item.checks}
    return tuple(name for name in CHECKS if name in names or (name == "answers" and names & OF_NUMBERS))


def prepare_ranks(case: Case) -> Expectation:
    """Return the expectation, and fill the caches of `check` of the properties of the ranks."""
    costs(case)
    return expect(case)


def prepare(case: Case) -> Expectation:
    """Return the expectation, and fill the caches of `check`. Call it while the ranks are at work."""
    expectation = prepare_ranks(case)
    if is_compared(case):
        oracle_results(expectation)
    return expectation


def check(
    case: Case, expectation: Expectation, observations: Observations, names: Sequence[str] = tuple(CHECKS)
) -> dict[str, float]:
    """Return the worst error / bound of each property that these checks make up, by title; 0 if it is exact. Raises the
    first failure, whose `broken` is the title of the property."""
    return run_checks(PROPERTIES, {name: CHECKS[name] for name in names}, case, expectation, observations)


def run_checks(
    properties: Sequence[Property], checks: Mapping[str, Callable[[Any, Any, Any], Ratios]],
    case: Any, expectation: Any, observations: Any,
) -> dict[str, float]:  # fmt: skip
    """Run `check` for any properties and checks, on a Case or another `CaseLike`."""
    ratios: dict[str, Ratios] = {}
    for name, run in checks.items():
        try:
            ratios[name] = run(case, expectation, observations)
        except VerificationFailure as failure:
            failure.check, failure.broken = name, next(item.title for item in properties if name in item.checks)
            raise
    complete = [item for item in properties if set(item.checks) <= set(checks) and item.concerns(case)]
    return {item.title: item.worst(ratios) for item in complete}


def broken_by(failure: VerificationFailure) -> str:
    """Return the title of the property that a failure breaks: a failure that no check raised is that of a rank."""
    return failure.broken or EVERY_RANK_ANSWERS.title
