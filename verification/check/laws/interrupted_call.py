"""An interrupted call closes its group: messages still in flight could match those of the next call."""

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
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.laws.law import How, Law, flag
from verification.failures import WrongResult
from verification.run.fresh_group import FreshCalls
from verification.run.in_flight_calls import DIRECTIONS, in_second_thread
from verification.run.rank import RankCall, shards, whole_tensors
from verification.strategies.cases import cases

ERRORS: dict[str, type[BaseException]] = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}
CLOSED = "nothing can be called on this group any more"


class _FailingPost(FreshCalls):
    """A transport that raises `error` in place of the first post, so that no message of the test stays in flight. It
    numbers calls by itself, since an interrupted call closes the numbering."""

    error: type[BaseException] | None = None

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self.error is not None:
            raise self.error("broken off")
        return super().post(sends, receives)


# Direction, error, texts of the errors (of the call, of the next one, of the next one in a second thread), and whether
# the group is still in memory without a reference to it.
Interrupted = tuple[str, str, tuple[str, str, str], bool]


def interrupt_calls(transport: Transport, case: Case, how: How) -> list[Interrupted]:
    """Task: interrupt a call in each direction by each kind of error, each on a group of its own."""
    interrupted: list[Interrupted] = []
    for direction in DIRECTIONS:
        for error in ERRORS:
            group = _FailingPost(transport)
            texts, reference = _interrupt(group, case, direction, error, how["check"]), weakref.ref(group)
            del group
            if reference() is not None:
                gc.collect()
            interrupted.append((direction, error, texts, reference() is not None))
    return interrupted


def _interrupt(group: _FailingPost, case: Case, direction: str, error: str, check: bool) -> tuple[str, str, str]:
    inputs = shards(case, group.rank, whole_tensors(case))

    def forward() -> RankCall:
        return RankCall.forward(group, case, inputs, "alike" if check else "unchecked")

    call = forward() if direction == "backward" else None
    group.error = ERRORS[error]
    text = _catch(forward if call is None else lambda: call.backward(inputs[3:5], retain=True))
    group.error = None
    return text, _catch(forward), _catch(lambda: in_second_thread(forward))


def _catch(function: Any) -> str:
    try:
        function()
    except (Exception, KeyboardInterrupt) as error:  # the law checks its type
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_interrupted(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    ranks.backend.submit(interrupt_calls, case, how)
    for index, calls in enumerate(ranks.backend.collect()):
        for direction, error, (raised, *later), alive in calls:
            where = f"index {index}: after a {direction} of call 1 that ended in the middle"
            what = f"since on this rank the {direction} of call 1 ended in the middle: {error}: broken off"
            if alive:
                raise WrongResult(f"{where} the group is still in memory")
            if raised != f"{error}: broken off":
                raise WrongResult(f"index {index}: an interrupted call must raise {error}, got {raised}")
            for thread, text in zip(("the same thread", "a second thread"), later, strict=True):
                if CLOSED not in text or what not in text:
                    raise WrongResult(f"{where}, a call from {thread} must be refused {what!r}, got {text}")
    return 0.0


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    case = replace(
        case, group=case.group if len(case.ranks) > 1 else None, tokens=max(case.tokens, 2 * world), cuts=None,
        pattern=Pattern.dense(), measured=False, keys=None,
    )  # fmt: skip
    return case, {"check": draw(st.booleans())}


# A single rank sends nothing.
BROKEN_OFF_CLOSES = Law(
    "a broken-off call closes its group", _draw, check_interrupted, share=0.03, most=60, fewest_ranks=2,
    how={"check": flag},
    cases={
        "messages from each of two ranks or more: a dense pattern, not causal, and no empty shard": lambda case: (
            len(case.ranks) > 1 and case.pattern == Pattern.dense() and 0 not in case.key_shards().counts
            and 0 not in case.shards().counts
        )
    },
)  # fmt: skip
