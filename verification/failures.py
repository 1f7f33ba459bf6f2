"""Failures, an exception type for each kind (a deadlock is a rank hang), never retried or shrunk into another kind."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

RankOutcome = Literal["answered", "raised", "died", "stopped", "blocked"]


@dataclass(frozen=True)
class Raised:
    """An exception that a rank's call raised, as text (the exception itself need not be picklable)."""

    type_name: str
    message: str
    traceback: str
    mismatched: bool = False  # True for MismatchedMessages

    @property
    def headline(self) -> str:
        first_line = self.message.partition("\n")[0]
        return f"{self.type_name}: {first_line}" if first_line else self.type_name


@dataclass(frozen=True)
class RankState:
    """State of one rank when a call failed: `detail` in words, `trace` its traceback or stack."""

    rank: int
    outcome: RankOutcome
    detail: str = ""
    trace: str = ""


class Refused(Exception):
    """A peer or a user's Setup cannot be run: not installed, not importable, ... It neither held nor failed."""


class Malformed(ValueError):
    """A result that a function under test may not return. The message names it; a stack would show our frames only."""


class VerificationFailure(AssertionError):
    """A counter-example. `kind` is the kind of failure in words; `check` and `broken` are the name of the check of an
    example that raised it, if one did, and the title of the broken property."""

    kind: ClassVar[str] = "failure"
    check: str | None = None
    broken: str | None = None


class WrongResult(VerificationFailure):
    """A wrong answer; all ranks answered. quantity: the wrong result ("out", "dq", ...). ratio: its error as a fraction
    of its bound, if it has one."""

    kind = "wrong result"

    def __init__(self, message: str = "", quantity: str | None = None, ratio: float | None = None) -> None:
        super().__init__(message)
        self.quantity = quantity
        self.ratio = ratio


class RankFailure(VerificationFailure):
    """A call in which at least one rank gave no result. `states` has one entry per rank, in rank order."""

    kind = "rank failure"

    def __init__(self, message: str, states: Sequence[RankState] = ()) -> None:
        super().__init__(message)
        self.headline = message
        self.states = tuple(states)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[RankState, ...]]]:
        return type(self), (self.headline, self.states)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], tuple[list[int], str]] = {}
        for state in self.states:  # group ranks with equal stacks, though thread names differ
            stack = re.sub(r"hread 0x[0-9a-f]+", "hread", state.trace)
            groups.setdefault((state.outcome, state.detail, stack), ([], state.trace))[0].append(state.rank)
        lines = [self.headline]
        for (outcome, detail, _), (ranks, trace) in groups.items():
            lines += [f"--- {name_ranks(ranks)} {detail or outcome}", *([trace.rstrip()] if trace else [])]
        return "\n".join(lines)

    def ranks(self, outcome: RankOutcome) -> tuple[int, ...]:
        """Return the ranks with that outcome, ascending."""
        return tuple(state.rank for state in self.states if state.outcome == outcome)


class RankCrash(RankFailure):
    """The process of a rank died: a signal, an abort, an exit."""

    kind = "rank crash"


class RankError(RankFailure):
    """A rank raised; the others answered, raised too, or were left waiting for it."""

    kind = "rank error"


class RankHang(RankFailure):
    """A rank gave no answer in time. The report has its Python stack, or says that a signal stopped it."""

    kind = "rank hang"


class Deadlock(RankHang):
    """No rank could go on. The simulation knows who waits for whom, so that no timeout is needed."""


class BrokenContract(RankFailure):
    """A rank broke the contract of its transport: a buffer was changed, shared or released while it was in flight."""

    kind = "broken contract"


class MismatchedMessages(RankFailure):
    """A message is not what its receiver expects: owner, hop, shape, dtype or size disagree."""

    kind = "mismatched messages"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 2`."""
    listed = list(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def name_exit(code: int | None) -> str:
    """Describe an exit code of `multiprocessing`: negative codes are signals."""
    if code is None:
        return "closed its pipe without ending"
    if code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGABRT:
        return (
            "was killed by SIGABRT, for the reason that it printed; gloo aborts where a message has another size than "
            "its receiver expects"
        )
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
