"""Failures of named kinds, each an exception type of its own. None is ever retried, or shrunk into another."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Outcome = Literal["answered", "raised", "died", "stopped", "blocked"]


@dataclass(frozen=True)
class Raised:
    """An exception that a rank's call raised, as text (the exception itself need not be picklable)."""

    type_name: str
    message: str
    traceback: str
    mismatched: bool = False  # it was a MismatchedMessages

    @property
    def headline(self) -> str:
        first_line = self.message.partition("\n")[0]
        return f"{self.type_name}: {first_line}" if first_line else self.type_name


@dataclass(frozen=True)
class RankState:
    """Where one rank stood when a call failed: `detail` says so, `trace` is its traceback or stack."""

    rank: int
    outcome: Outcome
    detail: str = ""
    trace: str = ""


class VerificationFailure(AssertionError):
    """What was verified does not hold. `kind` names in words how; `broken` is the title of the property that it breaks,
    where one of the checks of an example found it."""

    kind: ClassVar[str] = "failure"
    broken: str | None = None


class WrongResult(VerificationFailure):
    """All ranks answered, and an answer is wrong. quantity: the result ("out", "dq", ...) whose numbers are off; ratio:
    their error as a fraction of what is allowed, where there is such a fraction."""

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
        together: dict[tuple[str, str, str], tuple[list[int], str]] = {}
        for state in self.states:  # ranks that stand at the same place are named together, though thread names differ
            same = re.sub(r"hread 0x[0-9a-f]+", "hread", state.trace)
            together.setdefault((state.outcome, state.detail, same), ([], state.trace))[0].append(state.rank)
        lines = [self.headline]
        for (outcome, detail, _), (ranks, trace) in together.items():
            lines += [f"--- {name_ranks(ranks)} {detail or outcome}", *([trace.rstrip()] if trace else [])]
        return "\n".join(lines)

    def ranks(self, outcome: Outcome) -> tuple[int, ...]:
        """The ranks with that outcome, ascending."""
        return tuple(state.rank for state in self.states if state.outcome == outcome)


class RankCrash(RankFailure):
    """The process of a rank died: a signal, an abort, an exit."""

    kind = "rank crash"


class RankError(RankFailure):
    """A rank raised; the others answered, raised too, or were left waiting for it."""

    kind = "rank error"


class RankHang(RankFailure):
    """A rank gave no answer in time. Each such rank's Python stack is in the report, or that a signal stopped it."""

    kind = "rank hang"


class Deadlock(RankHang):
    """No rank could go on: who waits for whom is known without waiting (`verification.run.simulation.simulation`)."""


class BrokenContract(RankFailure):
    """A rank broke the contract of its transport: a buffer was touched, shared or given up while it was in flight."""

    kind = "broken contract"


class MismatchedMessages(RankFailure):
    """A message is not what its receiver expects: owner, hop, shape, dtype or size disagree."""

    kind = "mismatched messages"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0, 2`."""
    listed = list(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def name_exit(code: int | None) -> str:
    """What an exit code of `multiprocessing` means: negative codes are signals."""
    if code is None:
        return "closed its pipe without ending"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
