"""The faults that are struck into a rank, and what each must be named as."""

from __future__ import annotations

from dataclasses import dataclass

from verification.failures import MismatchedMessages, Outcome, RankCrash, RankError, RankHang, VerificationFailure


@dataclass(frozen=True)
class FaultKind:
    """title: in reports. failure: what the fault must be named as. outcome: where the failure then says that the rank
    stands; None: its text names the rank. simulated: gloo does not say it, but the same in the simulation does. asked:
    it is struck where the ranks ask each other something, not where they post messages, and the others must say who is
    absent.
    """

    name: str
    title: str
    failure: type[VerificationFailure]
    outcome: Outcome | None = None
    simulated: bool = False
    asked: bool = False

    @property
    def place(self) -> str:
        """What is counted to find the rank's place."""
        return "question" if self.asked else "post"

    @property
    def reshapes(self) -> bool:
        """Whether a message is given another shape."""
        return self.outcome is None

    @property
    def named_as(self) -> str:
        return f"{self.failure.kind}, by the simulation" if self.simulated else self.failure.kind


# The simplest first: shrinking ends there.
KINDS = (
    FaultKind("raise", "an exception", RankError, "raised"),
    FaultKind("kill", "kill -9", RankCrash, "died"),
    FaultKind("stop", "SIGSTOP", RankHang, "stopped"),
    FaultKind("short", "a message too short", MismatchedMessages),
    # gloo ends the process of the receiver, without a word on the sender.
    FaultKind("long", "a message too long", MismatchedMessages, simulated=True),
    FaultKind("absent", "kill -9, others ask", RankCrash, "died", asked=True),
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Fault:
    """Struck into the rank at that index of the group, at its post, or question, of that number. send: of the post's
    sends, the one that is given another shape.
    """

    kind: str  # name in KINDS
    index: int
    post: int
    send: int = 0


class MishandledFault(VerificationFailure):
    """A fault that was struck on purpose was not named, or not with its rank, or it left something behind."""

    kind = "mishandled fault"
