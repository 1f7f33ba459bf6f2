"""A law: a check that needs Cases of its own or several runs, mostly of a Case and of a changed one.

A law draws a Case and *how* to change it, both JSON-serialisable, so that its counter-examples are saved and replayed
like any other. `check` runs it on real ranks and returns the worst error as a fraction of its bound, 0 where the law is
exact. It raises WrongResult.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference import validators
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims
from verification.check.checks import assemble, compared
from verification.check.worst_entry import worst_entry
from verification.failures import WrongResult

How = dict[str, Any]
Rule = Callable[[Case, str, Any], object]  # validates a field of `how` (name, value): raises ValueError
MAX_INTEGER = 2**40  # tokens that a plan can count: the limit of buckets and of the integers of patterns


@dataclass(frozen=True)
class Law:
    """A metamorphic law.

    draw          a strategy of (Case, how), by world size; if `of_any`, also by the claim of the attention under test
    of_any        for a law of any attention: why a claim may leave it no subject. "": a law of this project's own
    of_others     raises ValueError for a subject that this project's attention takes and another one, of that claim,
                  need not
    how           a rule for each field of `how`; with `some`, fields may be missing. None: see `precondition`
    cases         conditions on the Case, as words and predicates
    precondition  raises ValueError for conditions on several fields
    """

    name: str
    draw: Callable[..., st.SearchStrategy[tuple[Case, How]]]
    check: Callable[[AttentionOnRanks, Case, How], float]
    precondition: Callable[[Case, Any], None] = lambda case, how: None
    _: KW_ONLY
    how: Mapping[str, Rule] | None = None
    some: bool = False
    cases: Mapping[str, Callable[[Case], bool]] = field(default_factory=dict)
    share: float  # of the examples of a world size
    most: int = 1000  # examples, whatever the share
    fewest_ranks: int = 1
    on_gpus: bool = True  # whether the law applies to GPUs
    on_cpus: bool = True  # whether the law applies to CPUs
    of_any: str = ""
    of_others: Callable[[Claims, Case, How], None] = lambda claims, case, how: None

    def concerns(self, backend: str) -> bool:
        """Return True if the law applies to the devices of the backend of that name."""
        return self.on_gpus if backend == "nccl" else self.on_cpus

    def validate(self, case: Case, how: Any) -> None:
        """Raise ValueError for a subject that the law never draws: a saved file may have been edited."""
        if self.how is not None:
            if not self.some:
                validators.exactly("how", how, self.how)
            elif not isinstance(how, dict) or not how or not set(how) <= set(self.how):
                raise ValueError(f"how is {how!r}; it must be an object with some of the fields {', '.join(self.how)}")
            for name, value in how.items():
                self.how[name](case, f"{name} of how", value)
        for condition, holds in self.cases.items():
            if not holds(case):
                raise ValueError(f"the law {self.name!r} applies only to Cases with {condition}")
        self.precondition(case, how)


def flag(case: Case, name: str, value: Any) -> None:
    """Rule: True or False."""
    validators.flag(name, value)


def anything(case: Case, name: str, value: Any) -> None:
    """Rule: any value; the Case or the law's precondition validates it."""


def bounded(case: Case, name: str, value: Any) -> None:
    """Rule: an integer that a plan can count."""
    validators.at_most(name, value, MAX_INTEGER)


def token(case: Case, name: str, value: Any) -> None:
    """Rule: the position of a token."""
    validators.integer(name, value, 0, case.tokens - 1)


def ascending(name: str, value: Any, limit: int) -> tuple[int, ...]:
    """Validate distinct numbers of range(limit) in ascending order."""
    numbers = validators.integers(name, value)
    if list(numbers) != sorted(set(numbers)) or any(number >= limit for number in numbers):
        raise ValueError(f"{name} is {list(value)}; it must be ascending, distinct integers below {limit}")
    return numbers


# --- Cases that laws change -------------------------------------------------------------------------------------------


TAME = {"values other than 'huge', whose sums overflow in some orders only": lambda case: case.values != "huge"}


def without_overflow(case: Case) -> Case:
    """Return the Case without values that overflow 16 bits in one order of summation and not in another."""
    return replace(case, values="normal") if case.values == "huge" else case


def changed(case: Case, how: Mapping[str, Any]) -> Case:
    """Return the Case with these fields; lists (from JSON) become tuples."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    return replace(case, **fields)


# --- comparisons ------------------------------------------------------------------------------------------------------


def worst_ratio(name: str, a: np.ndarray, b: np.ndarray, allowed: np.ndarray, how: How) -> float:
    """Return the worst |a - b| / allowed, the sum of their bounds. Raises WrongResult where it exceeds 1."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(a == b, 0.0, np.abs(a - b) / allowed)  # equal infinities differ by nothing
    if not (ratio <= 1.0).all():
        where = worst_entry(ratio)
        raise WrongResult(
            f"{name} at {where} is {a[where]} for the Case and {b[where]} with {how}: "
            f"{ratio[where]:.3g} times the sum of their bounds {allowed[where]:.3g}"
        )
    return float(ratio.max(initial=0.0))


def worst_difference(ranks: AttentionOnRanks, case: Case, other: Case, how: How) -> float:
    """Return the worst difference of the results of two Cases, as a fraction of the sum of their bounds."""
    observations, first = ranks.observe_and_expect(case)
    other_observations, second = ranks.observe_and_expect(other)
    worst = 0.0
    for name in compared(case):
        a, b = assemble(case, observations, name), assemble(other, other_observations, name)
        worst = max(worst, worst_ratio(name, a, b, first.bound[name] + second.bound[name], how))
    return worst


def same_numbers(name: str, a: np.ndarray, b: np.ndarray, when: str) -> None:
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if differ.any():
        where = tuple(map(int, np.argwhere(differ)[0]))
        raise WrongResult(f"{name} at {where} was {a[where]} and is {b[where]} {when}; must be the same bits")
