"""A group that ends is let go: no cache keeps it, no connection, thread or shared memory of it is left, and no later
group meets what it knew.

Programs that make groups anew (elastic training, a server's requests) would otherwise leak one each time; and what is
kept by a group's name would be taken for that of the next group of this name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference import fields
from verification.case import Case
from verification.check.laws.law import How, Law
from verification.draw.cases import cases
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.ended import ended


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    return case if case.group is None else replace(case, group=None, cuts=None), {}


def check_ended(backend: Backend, case: Case, how: How) -> float:
    """After a forward and a backward over a group of its own, eager and as `torch.compile` has them."""
    backend.submit(ended, case)
    for index, kept in enumerate(backend.collect()):
        if kept:
            raise WrongResult(f"on index {index}, of a group that was destroyed after the calls is still there: {kept}")
    return 0.0


def _premise(case: Case, how: Any) -> None:
    """On all ranks. On GPUs the memory that ranks share is theirs for as long as they run."""
    fields.exactly("how", how, [])
    if case.group is not None:
        raise ValueError(f"group is {case.group}; for the law of groups that end it must be None")
    if case.device != "cpu":
        raise ValueError(f"device is {case.device!r}; for the law of groups that end it must be 'cpu'")


A_GROUP_THAT_ENDS_IS_LET_GO = Law(
    "a group that ends is let go", _draw, check_ended, _premise, share=0.05, most=40, on_gpus=False
)
