"""A call that ends in the middle closes its group: what it had under way would meet the messages of the next call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference.pattern import Pattern
from ring.comm.transport import Message, Pending, Transport
from verification.case import Case
from verification.check.laws.law import How, Law, flag
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.fresh_group import FreshCalls
from verification.run.in_flight_calls import DIRECTIONS, in_second_thread
from verification.run.rank import RankCall, shards, whole_tensors
from verification.strategies.cases import cases

ERRORS: dict[str, type[BaseException]] = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}
CLOSED = "nothing can be called on this group any more"


class _Breaking(FreshCalls):
    """With calls of its own, since they are closed. Nothing is posted once it is to break: on all ranks the call ends
    before its first message, so that none of the test's own is left under way."""

    error: type[BaseException] | None = None

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self.error is not None:
            raise self.error("broken off")
        return super().post(sends, receives)


# A direction, an error, what was raised (by the call itself, and by the next ones, from the same thread and from a
# second one), and whether the group is still in memory when nobody refers to it any more.
Broken = tuple[str, str, tuple[str, str, str], bool]


def break_off(transport: Transport, case: Case, how: How) -> list[Broken]:
    """Task: calls that end in the middle, in both directions, by every kind of error. Each has a group of its own."""
    broken: list[Broken] = []
    for direction in DIRECTIONS:
        for error in ERRORS:
            breaking = _Breaking(transport)
            said, seen = _said_of(breaking, case, direction, error, how["check"]), weakref.ref(breaking)
            del breaking
            if seen() is not None:
                gc.collect()
            broken.append((direction, error, said, seen() is not None))
    return broken


def _said_of(breaking: _Breaking, case: Case, direction: str, error: str, check: bool) -> tuple[str, str, str]:
    inputs = shards(case, breaking.rank, whole_tensors(case))

    def forward() -> RankCall:
        return RankCall.forward(breaking, case, inputs, "alike" if check else "unchecked")

    call = forward() if direction == "backward" else None
    breaking.error = ERRORS[error]
    said = _said(forward if call is None else lambda: call.backward(inputs[3:], retain=True))
    breaking.error = None
    return said, _said(forward), _said(lambda: in_second_thread(forward))


def _said(act: Any) -> str:
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:  # the law checks which it is
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_broken_off(backend: Backend, case: Case, how: How) -> float:
    backend.submit(break_off, case, how)
    for index, calls in enumerate(backend.collect()):
        for direction, error, (by_itself, *later), kept in calls:
            where = f"index {index}: after a {direction} of call 1 that ended in the middle"
            what = f"since on this rank the {direction} of call 1 ended in the middle: {error}: broken off"
            if kept:
                raise WrongResult(f"{where} the group is still in memory")
            if by_itself != f"{error}: broken off":
                raise WrongResult(f"index {index}: a call that is broken off must raise {error}, got {by_itself}")
            for thread, text in zip(("the same thread", "a second thread"), later, strict=True):
                if CLOSED not in text or what not in text:
                    raise WrongResult(f"{where}, a call from {thread} must be refused {what!r}, got {text}")
    return 0.0


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    case = replace(
        case, group=case.group if len(case.ranks) > 1 else None, tokens=max(case.tokens, 2 * world), cuts=None,
        pattern=Pattern.dense(), measured=False,
    )  # fmt: skip
    return case, {"check": draw(st.booleans())}


# A single rank sends nothing.
BROKEN_OFF_CLOSES = Law(
    "a broken-off call closes its group", _draw, check_broken_off, share=0.03, most=60, fewest_ranks=2,
    how={"check": flag},
    cases={
        "messages from each of two ranks or more: a dense pattern, not causal, and no empty shard": lambda case: (
            len(case.ranks) > 1 and case.pattern == Pattern.dense() and 0 not in case.shards().counts
        )
    },
)  # fmt: skip
