"""The properties of one example that the report lists, each made of checks of `verification.check.checks`.

Causes come before their effects: a wrong shape before wrong numbers, a message that nobody takes before the bytes that
it makes too many. The oracle's is about the judge, not the ranks.
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
from verification.check.oracle_agreement import by_the_oracle, is_compared
from verification.failures import VerificationFailure
from verification.run.observation import Observations


@dataclass(frozen=True)
class Property:
    """A title in the report, and the checks (names in CHECKS) that it stands for. concerns: whether it is looked at on
    a Case."""

    title: str
    checks: tuple[str, ...]
    concerns: Callable[[Any], bool] = lambda case: True

    def worst(self, ratios: dict[str, Ratios]) -> float:
        """The largest error / bound of its checks, 0 where they are exact; NaN is larger than any number."""
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
    Property("gradients", ("gradients",)),
    Property("inputs intact, repeatable", ("inputs", "repeat")),
    Property("bytes sent", ("traffic",)),
    Property("buffers", ("buffers",)),
    Property("workspace of a call", ("workspace",), concerns=lambda case: case.measured),
)


# These put the ranks' results together, which takes the shapes that "answers" looks at.
_OF_RESULTS = {"unseen", "finite", "values", "gradients"}


def checks_of(titles: Collection[str]) -> tuple[str, ...]:
    """The checks by which these properties alone are judged, in the order in which they are made."""
    wanted = {name for one in PROPERTIES if one.title in titles for name in one.checks}
    return tuple(name for name in CHECKS if name in wanted or (name == "answers" and wanted & _OF_RESULTS))


def prepare(case: Case) -> Expectation:
    """What the Case must give; all else that `check` needs of the Case alone is computed and kept. So this can be done
    while the ranks are at work."""
    expectation = expect(case)
    costs(case)
    if is_compared(case):
        by_the_oracle(expectation)
    return expectation


def check(
    case: Case, expectation: Expectation, observations: Observations, names: Sequence[str] = tuple(CHECKS)
) -> dict[str, float]:
    """By title of each property that these checks make up: its worst error as a fraction of the bound, 0 where it is
    exact. Raises the first failure, whose `broken` is the title of the property."""
    return look_at(PROPERTIES, {name: CHECKS[name] for name in names}, case, expectation, observations)


def look_at(
    properties: Sequence[Property], checks: Mapping[str, Callable[[Any, Any, Any], Ratios]],
    case: Any, expectation: Any, observations: Any,
) -> dict[str, float]:  # fmt: skip
    """The same for any properties and checks, of a Case or of what takes its place."""
    ratios: dict[str, Ratios] = {}
    for name, made in checks.items():
        try:
            ratios[name] = made(case, expectation, observations)
        except VerificationFailure as failure:
            failure.broken = next(one.title for one in properties if name in one.checks)
            raise
    looked_at = [one for one in properties if set(one.checks) <= set(checks) and one.concerns(case)]
    return {one.title: one.worst(ratios) for one in looked_at}


def broken_by(failure: VerificationFailure) -> str:
    """The title of the property that a failure breaks: a failure that no check raised is that of a rank."""
    return failure.broken or EVERY_RANK_ANSWERS.title
