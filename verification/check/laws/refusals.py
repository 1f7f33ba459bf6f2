"""Wrong calls raise the same error on every rank, and leave the group usable."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

from hypothesis import strategies as st

from reference import validators
from ring.comm.transport import Transport
from verification.case import Case
from verification.check import properties
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.expectation import expect
from verification.check.laws.law import How, Law, anything, changed, flag
from verification.check.laws.refusal_cases import MISTAKES, Mistake, applicable, call
from verification.failures import WrongResult
from verification.run.fresh_group import new_group
from verification.run.observation import Observation
from verification.run.rank import observe
from verification.strategies.cases import cases, other_sharding

# The values of one argument on two ranks; of lists, one entry each, and the number of entries.
_DIFFERENCE = re.compile(
    r"rank 0 has (?P<first>.*?)(?: as number \d+ of \d+)?, rank \d+ (?P<second>.*?)(?: as number \d+ of \d+)?$"
)


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world)).for_any_ranks()
    # Ranks of a subgroup have two numbers each, which refusals must not confuse.
    if draw(st.sampled_from((False, False, False, True))):
        case = changed(case, other_sharding(draw, case))
    possible = applicable(case)
    pairs = st.tuples(st.sampled_from(possible), st.integers(-1, len(case.ranks) - 1))
    # Draw many (5 or 6 as a rule), since each costs little beside the right call at the end.
    mistakes = [pair for least in (1, 0, 0, 0) for pair in draw(st.lists(pairs, min_size=least, max_size=12))]
    how: How = {
        "mistakes": [[name, _culprit(name, number)] for name, number in mistakes],
        "compiled": draw(st.booleans()),
    }
    # The first agreement on a group takes another path than later ones.
    on_new = case.group is None and not draw(st.integers(0, 3))
    without_page = draw(st.integers(-1, len(case.ranks) - 1)) if on_new else -1
    return case, how | {"new_group": on_new, "without_page": None if without_page < 0 else without_page}


def _culprit(mistake: str, number: int) -> int | None:
    """Return the index of the rank that makes the mistake, None for all ranks."""
    if MISTAKES[mistake].who == "all" or number < 0:
        return 0 if MISTAKES[mistake].who == "one" else None
    return number


def check_refused(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """If one rank or all ranks call wrongly, every rank raises the same error, which names the argument. After several
    mistakes a right call works.

    compiled: calls as compiled graphs make them. new_group: calls on a new group, on CPUs only: GPU ranks keep their
    shared memory for their lifetime. without_page: index of the rank that cannot map the new group's shared page, or
    None.
    """
    # Drawn for CPUs: GPUs compare less.
    mistakes = [(mistake, culprit) for mistake, culprit in how["mistakes"] if MISTAKES[mistake].possible(case)]
    on_new = how["new_group"] and case.device == "cpu"
    ranks.backend.submit(call_wrongly, case, mistakes, how["compiled"], on_new, how["without_page"])
    expectation = expect(case)
    answers = ranks.backend.collect()
    for number, (mistake, culprit) in enumerate(mistakes):
        where = "on every rank" if culprit is None else f"on index {culprit} of the group"
        _check_errors(f"{mistake} {where}", MISTAKES[mistake], [errors[number] for errors, _ in answers])
    properties.check(case, expectation, [observation for _, observation in answers])
    return 0.0


def _check_errors(description: str, mistake: Mistake, errors: list[tuple[str, str] | None]) -> None:
    for index, error in enumerate(errors):
        if error is None:
            raise WrongResult(f"index {index} of the group raised nothing: {description}")
        if error[0] not in ("ValueError", "NotImplementedError"):
            raise WrongResult(f"index {index} of the group raised {error[0]}: {error[1]}; {description}")
        if error != errors[0]:
            raise WrongResult(f"index {index} of the group raised {error}, index 0 {errors[0]}: {description}")
        if mistake.argument not in error[1]:
            raise WrongResult(f"the error does not name {mistake.argument!r}: {description}: {error[1]}")
        shown = _DIFFERENCE.search(error[1])
        if shown and shown["first"] == shown["second"]:
            raise WrongResult(f"the error shows no difference: {description}: {error[1]}")


def call_wrongly(
    transport: Transport, case: Case, mistakes: list[tuple[str, int | None]], compiled: bool, on_new: bool,
    without_page: int | None,
) -> tuple[list[tuple[str, str] | None], Observation]:  # fmt: skip
    """Task: make the mistakes one after the other, then a right call on all ranks."""
    with new_group(transport, without_page) if on_new else nullcontext(transport) as group:
        errors = [call(group, case, mistake, culprit, compiled) for mistake, culprit in mistakes]
        return errors, observe(group, case, None, False)


def _pairs(case: Case, name: str, value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError(f"{name} is {value!r}; it must be a list of at least one [mistake, index or null]")
    possible = applicable(case)
    for mistake, culprit in value:
        validators.choice("a mistake of how", mistake, possible)
        who = MISTAKES[mistake].who
        if culprit is not None:
            validators.integer(f"the index that makes {mistake!r}", culprit, 0, len(case.ranks) - 1)
        if (culprit is None and who == "one") or (culprit is not None and who == "all"):
            allowed = "an index: one rank differs" if who == "one" else "null: all ranks make it together"
            raise ValueError(f"the index that makes {mistake!r} is {culprit}; it must be {allowed}")


def _precondition(case: Case, how: How) -> None:
    if how["new_group"] and case.group is not None:
        raise ValueError(f"group is {case.group}; with new_group it must be None")
    if how["without_page"] is not None:
        validators.integer(
            "without_page of how", how["without_page"], 0, len(case.ranks) - 1 if how["new_group"] else -1
        )


WRONG_CALLS_REFUSED = Law(
    "wrong calls refused everywhere", _draw, check_refused, _precondition, share=0.13,
    how={"mistakes": _pairs, "compiled": flag, "new_group": flag, "without_page": anything},
)  # fmt: skip
