"""A law between Cases: what must stay the same, or change along, when a Case is changed in a known way.

A law draws a Case and *how* to change it, both JSON-serialisable, so that its counter-examples are saved and replayed
like any other. `check` runs it on real ranks, returns the worst error as a fraction of what is allowed, 0 where the law
is exact, and raises WrongResult. `premise` says which pairs the law is about: a saved file may have been edited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference.exact import QUANTITIES
from verification.case import Case
from verification.failures import WrongResult
from verification.run.backends import Backend

How = dict[str, Any]
MOST_INTEGER = 2**40  # of buckets, and of what patterns count in: tokens that a plan can count


@dataclass(frozen=True)
class Law:
    """draw: by world size, a strategy of (Case, how). premise: raises ValueError unless `how` is one that the law may
    draw for that Case."""

    name: str
    draw: Callable[[int], st.SearchStrategy[tuple[Case, How]]]
    check: Callable[[Backend, Case, How], float]
    premise: Callable[[Case, Any], None]
    share: float  # of the examples that a world size is given
    most: int = 1000  # examples, however many those are
    fewest_ranks: int = 1  # that it is about
    on_gpus: bool = True  # whether it is about them, too
    on_cpus: bool = True  # likewise

    def concerns(self, backend: str) -> bool:
        """Whether it is about the devices of the backend of that name."""
        return self.on_gpus if backend == "nccl" else self.on_cpus


# --- Cases that laws change -------------------------------------------------------------------------------------------


def tame(case: Case) -> Case:
    """Without values that overflow 16 bits in one order of summation and not in another."""
    return replace(case, values="normal") if case.values == "huge" else case


def changed(case: Case, how: Mapping[str, Any]) -> Case:
    """The Case with these fields, lists (as JSON has them) made tuples."""
    listed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    return replace(case, **listed)


# --- what laws compare ------------------------------------------------------------------------------------------------


def compared(case: Case) -> list[str]:
    return [name for name in QUANTITIES if name != "lse" or case.lse != "unused"]


def worst_ratio(name: str, a: np.ndarray, b: np.ndarray, allowed: np.ndarray, how: How) -> float:
    """The worst |a - b| as a fraction of both their bounds together."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(a == b, 0.0, np.abs(a - b) / allowed)  # equal infinities differ by nothing
    if not (ratio <= 1.0).all():
        where = np.unravel_index(int(np.argmax(np.nan_to_num(ratio, nan=np.inf))), ratio.shape)
        raise WrongResult(
            f"{name} at {_plain(where)} is {a[where]} for the Case and {b[where]} with {how}: "
            f"{ratio[where]:.3g} times the sum of their bounds {allowed[where]:.3g}"
        )
    return float(ratio.max(initial=0.0))


def same_numbers(name: str, a: np.ndarray, b: np.ndarray, when: str) -> None:
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if differ.any():
        where = tuple(np.argwhere(differ)[0])
        raise WrongResult(f"{name} at {_plain(where)} was {a[where]} and is {b[where]} {when}; must be the same bits")


def _plain(where: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in where)


# --- premises ---------------------------------------------------------------------------------------------------------


def needs_tame(case: Case) -> None:
    """Raises ValueError for a Case that `tame` would change."""
    if case.values == "huge":
        raise ValueError("values is 'huge'; this law takes none that overflow in one order of a sum and not in another")
