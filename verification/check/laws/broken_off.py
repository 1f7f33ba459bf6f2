"""A call that ends in the middle closes its group: what it had under way would meet the messages of the next call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference import fields
from reference.pattern import Pattern
from ring.comm.calls import Calls
from ring.comm.transport import Message, Pending, RecordingTransport, Transport
from verification.case import Case
from verification.check.laws.law import How, Law
from verification.draw.cases import cases
from verification.failures import WrongResult
from verification.run.backends import Backend
from verification.run.programs import in_second_thread
from verification.run.rank import RankCall, shards, whole_tensors

ERRORS: dict[str, type[BaseException]] = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}
DIRECTIONS = ("forward", "backward")
CLOSED = "nothing can be called on this group any more"


class _Breaking(RecordingTransport):
    """Another transport, with calls of its own, since they are closed. Nothing is posted once it is to break: on all
    ranks the call ends before its first message, so that none of the test's own is left under way."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls = Calls()
        self.error: type[BaseException] | None = None

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self.error is not None:
            raise self.error("broken off")
        return super().post(sends, receives)


def break_off(transport: Transport, case: Case, how: How) -> list[str]:
    """Task: what a call said that ended in the middle, and what the next ones said, from this thread and from a second
    one; and what is still in memory of the group when nobody refers to it any more, "" if nothing is."""
    breaking = _Breaking(transport)
    said, seen = _said_of(breaking, case, how), weakref.ref(breaking)
    del breaking
    if seen() is not None:
        gc.collect()
    return [*said, "" if seen() is None else "the group is still in memory"]


def _said_of(breaking: _Breaking, case: Case, how: How) -> list[str]:
    inputs = shards(case, breaking.rank, whole_tensors(case))
    manner = "alike" if how["check"] else "unchecked"

    def forward() -> RankCall:
        return RankCall.forward(breaking, case, inputs, manner)

    call = forward() if how["direction"] == "backward" else None
    breaking.error = ERRORS[how["error"]]
    said = [_said(forward if call is None else lambda: call.backward(inputs[3:], retain=True))]
    breaking.error = None
    return [*said, _said(forward), _said(lambda: in_second_thread(forward))]


def _said(act: Any) -> str:
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:  # the law checks which it is
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_broken_off(backend: Backend, case: Case, how: How) -> float:
    backend.submit(break_off, case, how)
    what = f"since on this rank the {how['direction']} of call 1 ended in the middle: {how['error']}: broken off"
    for index, (broken, *later, kept) in enumerate(backend.collect()):
        if kept:
            raise WrongResult(f"index {index}: after a {how['direction']} that ended in the middle {kept}")
        if broken != f"{how['error']}: broken off":
            raise WrongResult(f"index {index}: a call that is broken off must raise {how['error']}, got {broken}")
        for where, said in zip(("the same thread", "a second thread"), later, strict=True):
            if CLOSED not in said or what not in said:
                raise WrongResult(
                    f"index {index}: after a {how['direction']} of call 1 that ended in the middle, a call from "
                    f"{where} must be refused {what!r}, got {said}"
                )
    return 0.0


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    case = draw(cases(world))
    case = replace(
        case, group=case.group if len(case.ranks) > 1 else None, tokens=max(case.tokens, 2 * world), cuts=None,
        pattern=Pattern.dense(), measured=False,
    )  # fmt: skip
    how: How = {
        "direction": draw(st.sampled_from(DIRECTIONS)),
        "error": draw(st.sampled_from(sorted(ERRORS))),
        "check": draw(st.booleans()),
    }
    return case, how


def _premise(case: Case, how: Any) -> None:
    fields.exactly("how", how, ["direction", "error", "check"])
    fields.choice("direction of how", how["direction"], DIRECTIONS)
    fields.choice("error of how", how["error"], sorted(ERRORS))
    fields.flag("check of how", how["check"])
    if len(case.ranks) == 1 or case.pattern != Pattern.dense() or 0 in case.shards().counts:
        raise ValueError(
            "all ranks, and there must be two or more, must have messages to send: pattern must be dense and not "
            "causal, no shard empty"
        )


# A single rank sends nothing.
BROKEN_OFF_CLOSES = Law(
    "a broken-off call closes its group", _draw, check_broken_off, _premise, share=0.03, most=60, fewest_ranks=2
)
