"""Faults, and what a rank does that one is struck into. Ranks come with this module: it imports no more than `run`."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ring.comm.transport import Message, Outgoing, Pending, RecordingTransport, Transport
from verification.case import Case
from verification.failures import MismatchedMessages, Outcome, RankCrash, RankError, RankHang, VerificationFailure
from verification.run.observation import Observation
from verification.run.rank import observe


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault, and what it must be named as.

    title      in reports
    failure    the kind of failure that it must be
    outcome    where the failure says that the rank stands; None: a message is given another shape, and the text of
               the failure names the rank
    simulated  gloo does not say it, but the same in the simulation does
    asked      it is struck where the ranks ask each other something, not where they post messages, and the others must
               say who is absent
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
    """A fault in the rank at that index of the group, at its post, or question, of that number. send: of the post's
    sends, the one that is given another shape."""

    kind: str  # name in KINDS
    index: int
    post: int
    send: int = 0


class InjectedFault(Exception):
    """Raised within a rank on purpose."""


class FaultyTransport(RecordingTransport):
    """A transport that counts its posts and questions, and at one of them strikes. posts: the sends of each so far."""

    def __init__(self, inner: Transport, fault: Fault | None) -> None:
        super().__init__(inner)
        self.posts: list[int] = []
        self._questions = 0
        self._fault = fault

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Tells nothing of the messages to come, as gloo needs none of it: a wrong one is for its receiver to find, not
        for a comparison with what the sender told."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.posts.append(len(sends))
        if self._strikes("post", len(self.posts) - 1):
            assert self._fault is not None
            sends = inject(self._fault, sends)
        return super().post(sends, receives)

    def all_equal(self, payload: bytes) -> bool:
        self._questions += 1
        if self._strikes("question", self._questions - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().all_equal(payload)

    def _strikes(self, place: str, number: int) -> bool:
        fault = self._fault
        return fault is not None and BY_NAME[fault.kind].place == place and fault.post == number


def inject(fault: Fault, sends: Sequence[Message]) -> list[Message]:
    """The sends, one of another shape; or the end of this process, a halt, an InjectedFault."""
    if fault.kind == "raise":
        raise InjectedFault(f"at post {fault.post}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind in ("short", "long"):
        return [reshaped(m, fault.kind) if number == fault.send else m for number, m in enumerate(sends)]
    return list(sends)


def reshaped(message: Message, kind: str) -> Message:
    """With an entry less or more. A message has a key and a value, so two entries at least."""
    entries = message.tensor.view(-1)
    buffer = entries[:-1].clone() if kind == "short" else torch.cat((entries, entries[:1]))
    return replace(message, buffer=buffer, start=0, stop=None)


def observe_struck(transport: Transport, case: Case, fault: Fault | None) -> tuple[Observation, list[int]]:
    """A task: `observe`, once, with a fault where it is meant for this rank; and the number of sends of each post."""
    if fault is not None and fault.kind == "long" and dist.get_world_size() > 1:  # not in the simulation's process
        end_silently()
    made: list[FaultyTransport] = []

    def record(inner: Transport) -> FaultyTransport:
        made.append(FaultyTransport(inner, fault if fault is not None and fault.index == inner.rank else None))
        return made[-1]

    seen = observe(transport, case, repeat=False, record=record)
    return seen, made[0].posts


def end_silently() -> None:
    """This rank may be about to be aborted by gloo, which then prints, and may leave its memory in a file. The rank is
    replaced afterwards, whatever becomes of it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
