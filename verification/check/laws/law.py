"""A law between Cases: what must stay the same, or change along, when a Case is changed in a known way.

A law draws a Case and *how* to change it, both JSON-serialisable, so that its counter-examples are saved and replayed
like any other. `check` runs it on real ranks, returns the worst error as a fraction of what is allowed, 0 where the law
is exact, and raises WrongResult.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference import validators
from verification.case import Case
from verification.check.oracle_agreement import largest
from verification.failures import WrongResult
from verification.run.backends import Backend

How = dict[str, Any]
Rule = Callable[[Case, str, Any], object]  # of a field of `how`, its name and its value: raises ValueError
MOST_INTEGER = 2**40  # of buckets, and of what patterns count in: tokens that a plan can count


@dataclass(frozen=True)
class Law:
    """draw: by world size, a strategy of (Case, how).

    how      a rule for each field of `how`; with `some`, it may have only some of them. None: see `premise`
    cases    the Cases that the law is about, as words and a predicate
    premise  raises ValueError for what the others cannot tell by themselves
    """

    name: str
    draw: Callable[[int], st.SearchStrategy[tuple[Case, How]]]
    check: Callable[[Backend, Case, How], float]
    premise: Callable[[Case, Any], None] = lambda case, how: None
    _: KW_ONLY
    how: Mapping[str, Rule] | None = None
    some: bool = False
    cases: Mapping[str, Callable[[Case], bool]] = field(default_factory=dict)
    share: float  # of the examples that a world size is given
    most: int = 1000  # examples, however many those are
    fewest_ranks: int = 1  # that it is about
    on_gpus: bool = True  # whether it is about them, too
    on_cpus: bool = True  # likewise

    def concerns(self, backend: str) -> bool:
        """Whether it is about the devices of the backend of that name."""
        return self.on_gpus if backend == "nccl" else self.on_cpus

    def validate(self, case: Case, how: Any) -> None:
        """Raise ValueError for what the law never draws: a saved file may have been edited."""
        if self.how is not None:
            if not self.some:
                validators.exactly("how", how, self.how)
            elif not isinstance(how, dict) or not how or not set(how) <= set(self.how):
                raise ValueError(f"how is {how!r}; it must be an object with some of the fields {', '.join(self.how)}")
            for name, value in how.items():
                self.how[name](case, f"{name} of how", value)
        for words, holds in self.cases.items():
            if not holds(case):
                raise ValueError(f"the law {self.name!r} is one of Cases with {words}; this Case is another one")
        self.premise(case, how)


def flag(case: Case, name: str, value: Any) -> None:
    """Rule: True or False."""
    validators.flag(name, value)


def anything(case: Case, name: str, value: Any) -> None:
    """Rule: whatever a Case takes, which looks at it itself, or what the law's premise looks at."""


def bounded(case: Case, name: str, value: Any) -> None:
    """Rule: what can be counted."""
    validators.at_most(name, value, MOST_INTEGER)


def token(case: Case, name: str, value: Any) -> None:
    """Rule: the position of a token."""
    validators.integer(name, value, 0, case.tokens - 1)


def ascending(name: str, value: Any, limit: int) -> tuple[int, ...]:
    """Validate different numbers of range(limit) in their order."""
    numbers = validators.integers(name, value)
    if list(numbers) != sorted(set(numbers)) or any(number >= limit for number in numbers):
        raise ValueError(f"{name} is {list(value)}; it must be ascending numbers of range({limit})")
    return numbers


# --- Cases that laws change -------------------------------------------------------------------------------------------


TAME = {"values that do not overflow in one order of a sum alone: any but 'huge'": lambda case: case.values != "huge"}


def without_overflow(case: Case) -> Case:
    """The Case without values that overflow 16 bits in one order of summation and not in another."""
    return replace(case, values="normal") if case.values == "huge" else case


def changed(case: Case, how: Mapping[str, Any]) -> Case:
    """The Case with these validators, lists (as JSON has them) made tuples."""
    listed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    return replace(case, **listed)


# --- what laws compare ------------------------------------------------------------------------------------------------


def worst_ratio(name: str, a: np.ndarray, b: np.ndarray, allowed: np.ndarray, how: How) -> float:
    """The worst |a - b| as a fraction of both their bounds together."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(a == b, 0.0, np.abs(a - b) / allowed)  # equal infinities differ by nothing
    if not (ratio <= 1.0).all():
        where = largest(ratio)
        raise WrongResult(
            f"{name} at {where} is {a[where]} for the Case and {b[where]} with {how}: "
            f"{ratio[where]:.3g} times the sum of their bounds {allowed[where]:.3g}"
        )
    return float(ratio.max(initial=0.0))


def same_numbers(name: str, a: np.ndarray, b: np.ndarray, when: str) -> None:
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if differ.any():
        where = tuple(map(int, np.argwhere(differ)[0]))
        raise WrongResult(f"{name} at {where} was {a[where]} and is {b[where]} {when}; must be the same bits")
