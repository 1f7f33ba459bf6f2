"""The properties of one example that the report lists, each made of checks of `verification.check.checks`.

Every property but the workspace is looked at on every example, in an order in which a cause comes before its effects: a
wrong shape before wrong numbers, a message that nobody takes before the bytes that it makes too many.
"""

from __future__ import annotations

import numpy as np

from reference.exact import Expectation
from verification.case import Case
from verification.check.checks import CHECKS
from verification.failures import RankFailure, VerificationFailure
from verification.run.observation import Observations

# Title -> the checks behind it. "values" serves two titles: which one is told by the quantity.
OUTPUT = "output and lse"
GRADIENTS = "gradients"
WORKSPACE = "workspace of a call"  # looked at where the Case is measured
PROPERTIES: dict[str, tuple[str, ...]] = {
    "layout as defined": ("layout",),
    "types, shapes, finite": ("answers", "finite"),
    "messages match": ("messages",),
    "nothing selected: 0, -inf": ("unseen",),
    OUTPUT: ("values",),
    GRADIENTS: ("values",),
    "inputs intact, repeatable": ("inputs", "repeat"),
    "bytes sent": ("traffic",),
    "buffers": ("buffers",),
    WORKSPACE: ("workspace",),
}
EVERY_RANK_ANSWERS = "every rank answers"  # broken by a crash, a hang or an exception


def check(case: Case, expectation: Expectation, observations: Observations) -> dict[str, float]:
    """The worst error of each property as a fraction of its bound, 0 where it is exact. Raises the first
    failure.
    """
    ratios = {name: ratio(case, expectation, observations) for name, ratio in CHECKS.items()}
    found = dict.fromkeys((EVERY_RANK_ANSWERS, *PROPERTIES), 0.0)
    found[OUTPUT] = worst(ratios["values"], ("out", "lse"))
    found[GRADIENTS] = worst(ratios["values"], ("dq", "dk", "dv"))
    if not case.measured:
        del found[WORKSPACE]
    return found


def worst(ratios: dict[str, float], quantities: tuple[str, ...]) -> float:
    """The largest of these; NaN, which no comparison finds, is the largest of all."""
    return float(np.max([ratios[name] for name in quantities if name in ratios], initial=0.0))


def broken_by(failure: VerificationFailure) -> str:
    """The title of the property that a failure of a check breaks: checks begin their message with their name."""
    if isinstance(failure, RankFailure) and failure.states:  # from the pool: it knows where the ranks stand
        return EVERY_RANK_ANSWERS
    name, _, rest = str(failure).partition(": ")
    if name == "values":
        return OUTPUT if rest.split(" ", 1)[0] in ("out", "lse") else GRADIENTS
    return next((title for title, checks in PROPERTIES.items() if name in checks), name)
