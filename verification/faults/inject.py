"""Faults, and their injection in a rank. Ranks preload this module, so it imports nothing beyond `run`."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from ring.comm import process_group
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Message, Outgoing, Pending, Transport
from verification.case import Case
from verification.failures import MismatchedMessages, RankCrash, RankError, RankHang, RankOutcome, VerificationFailure
from verification.run.observation import Observation
from verification.run.pretended_hosts import pretending
from verification.run.rank import observe
from verification.run.recording_transport import RecordingTransport

LATE_TIMEOUT = 3.5  # seconds, of the group with a late rank
WORDS_TIMEOUT = 20.0  # seconds for all ranks to raise, on a loaded machine too
SLOWNESS = 0.4  # seconds of a rank that comes to a consensus after another was killed: it is not missing
WORDS_SEPARATOR = " ;; "


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault, and the failure that must report it.

    title         in reports
    failure       the kind of failure that it must cause
    outcome       state of the rank in that failure; None: a message gets another shape, and the failure's text names
                  the rank
    simulated     gloo does not report it, but the same fault in the simulation does
    at_consensus  it strikes at a consensus of the ranks, not when they post messages, and the others must name the
                  absent rank
    """

    name: str
    title: str
    failure: type[VerificationFailure]
    outcome: RankOutcome | None = None
    simulated: bool = False
    at_consensus: bool = False

    @property
    def trigger(self) -> str:
        """Kind of step at which it strikes; the steps of this kind are counted."""
        return "consensus" if self.at_consensus else "post"

    @property
    def named_as(self) -> str:
        return f"{self.failure.kind}, by the simulation" if self.simulated else self.failure.kind


# Keep the simplest first: shrinking ends there.
KINDS = (
    FaultKind("raise", "an exception", RankError, "raised"),
    FaultKind("kill", "kill -9", RankCrash, "died"),
    FaultKind("stop", "SIGSTOP", RankHang, "stopped"),
    FaultKind("short", "a message too short", MismatchedMessages),
    # gloo ends the receiver's process without naming the sender.
    FaultKind("long", "a message too long", MismatchedMessages, simulated=True),
    FaultKind("absent", "kill -9, others ask", RankCrash, "died", at_consensus=True),
    FaultKind("in flight", "kill -9, messages sent", RankCrash, "died"),
    FaultKind("late", "comes after the timeout", RankError, "raised", at_consensus=True),
    FaultKind("host", "kill -9 of a host", RankCrash, "died"),
    FaultKind("interrupt", "Ctrl-C", RankError, "raised", at_consensus=True),
    FaultKind("memory", "out of memory", RankError, "raised", at_consensus=True),
)
ERRORS: dict[str, type[BaseException]] = {"interrupt": KeyboardInterrupt, "memory": torch.OutOfMemoryError}
# Functions that raise an error from a consensus on; a rank that needs none of them raises it at the end.
PLACES = (
    "ring.comm.shared_page.SharedPage.has_come", "ring.consensus.agree_backward", "ring.attend.accumulator_for",
    "ring.attend.sum_class_for", "ring.comm.transport.LocalBuffers.empty", "ring.compute.kernel_calls.forward",
    "ring.compute.kernel_calls.backward", "ring.comm.process_group._PendingWorks.arrive",
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, which may strike others of its host too."""

    kind: str  # name in KINDS
    index: int  # of the rank in the group
    post: int  # number of the post, or consensus, at which it strikes
    send: int = 0  # index of the post's send that gets another shape; of an error the number of its place

    def struck(self, ranks: int) -> range:
        """Return the indices that it strikes in a group of so many ranks: one, or a host, half of the group."""
        if self.kind != "host":
            return range(self.index, self.index + 1)
        first = ranks // 2
        return range(first) if self.index < first else range(first, ranks)


class InjectedFault(Exception):
    """The exception of the "raise" fault."""


class LateRank(Exception):
    """Errors of all ranks of a group with a late one, raised by each of them: "index: error" for each index."""


class FaultyTransport(RecordingTransport):
    """A transport that counts its posts and consensuses, and strikes at one. posts: number of sends of each post."""

    def __init__(self, inner: Transport, fault: Fault | None) -> None:
        super().__init__(inner)
        self.posts: list[int] = []
        self._rounds = 0
        self._fault = fault if fault is not None and fault.index == self.rank else None
        self._pids: list[bytes] = []
        if fault is not None and fault.kind == "host":
            self._pids = inner.all_gather(os.getpid().to_bytes(8, "little"))
        # Ranks look at each other in order, so that they find the one that was killed before this one has come.
        previous = (self.rank - 1) % self.world_size
        previous_dies = fault is not None and fault.kind == "absent" and fault.index == previous
        # Of two ranks the other one must come in time: nobody else can miss the one that was killed.
        self._slow_round = fault.post if fault is not None and previous_dies and self.world_size > 2 else None

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Announce nothing (gloo does not need it): the receiver must find a wrong message, not a comparison."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.posts.append(len(sends))
        if self._strikes("post", len(self.posts) - 1):
            assert self._fault is not None
            if self._fault.kind == "host":
                for index in {*self._fault.struck(self.world_size)} - {self.rank}:
                    os.kill(int.from_bytes(self._pids[index], "little"), signal.SIGKILL)
            sends = inject(self._fault, sends)
            if self._fault.kind == "in flight":
                super().post(sends, receives)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().post(sends, receives)

    def all_equal(self, payload: bytes) -> bool:
        self._rounds += 1
        if self._slow_round == self._rounds - 1:
            time.sleep(SLOWNESS)
        if self._strikes("consensus", self._rounds - 1):
            assert self._fault is not None
            if self._fault.kind == "absent":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self._fault.kind in ERRORS:  # new ranks take the place of this one
                patch(PLACES[self._fault.send % len(PLACES)], side_effect=ERRORS[self._fault.kind]).start()
            else:
                await_words(self.inner, [index for index in range(self.world_size) if index != self.rank])
        return super().all_equal(payload)

    def _strikes(self, trigger: str, number: int) -> bool:
        fault = self._fault
        return fault is not None and BY_NAME[fault.kind].trigger == trigger and fault.post == number


def inject(fault: Fault, sends: Sequence[Message]) -> list[Message]:
    """Raise, kill or stop this process, or return the sends with one of another shape."""
    if fault.kind == "raise":
        raise InjectedFault(f"at post {fault.post}")
    if fault.kind in ("kill", "host"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind in ("short", "long"):
        return [reshaped(m, fault.kind) if number == fault.send else m for number, m in enumerate(sends)]
    return list(sends)


def reshaped(message: Message, kind: str) -> Message:
    """Return the message with one entry less or more. It has at least two: a key and a value."""
    entries = message.tensor.view(-1)
    buffer = entries[:-1].clone() if kind == "short" else torch.cat((entries, entries[:1]))
    return replace(message, buffer=buffer, start=0, stop=None)


def observe_with_fault(transport: Transport, case: Case, fault: Fault | None) -> tuple[Observation, list[int]]:
    """Task: `observe` once, with the fault if it is this rank's; also returns the number of sends of each post."""
    if fault is not None and fault.kind == "long" and dist.get_world_size() > 1:  # not in the simulation's process
        silence_abort()
    transports: list[FaultyTransport] = []
    late = fault is not None and fault.kind == "late"
    if late:
        shorten_timeout(transport)

    def record(inner: Transport) -> FaultyTransport:
        transports.append(FaultyTransport(inner, fault))
        return transports[-1]

    try:
        with pretending(case, transport.rank) if late else nullcontext():  # the ranks meet again
            observation = observe(transport, case, repeat=False, record=record)
        if fault is not None and fault.kind in ERRORS and fault.index == transport.rank:
            raise ERRORS[fault.kind]
    except (RuntimeError, ValueError) as error:
        if late:
            raise LateRank(exchange_words(transport, f"{type(error).__name__}: {error}")) from None
        raise
    return observation, transports[0].posts


def shorten_timeout(transport: Transport) -> None:
    """Set a short timeout for the group, and have its ranks meet in the store again, as in their first call.

    A new group of these ranks alone would reuse an old name, and one of the world needs the ranks outside.
    """
    assert isinstance(transport, ProcessGroupTransport)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LATE_TIMEOUT), transport.group)
    process_group._meetings.pop(transport.group, None)


def await_words(transport: Transport, indices: Sequence[int]) -> None:
    """Wait until these ranks have said their words, at most WORDS_TIMEOUT."""
    assert isinstance(transport, ProcessGroupTransport)
    with suppress(RuntimeError):
        keys = [_words_key(index) for index in indices]
        transport.group.get_group_store().wait(keys, timedelta(seconds=WORDS_TIMEOUT))


def exchange_words(transport: Transport, words: str) -> str:
    """Return "index: words" for each rank that says some within WORDS_TIMEOUT, in one line."""
    assert isinstance(transport, ProcessGroupTransport)
    store, ranks = transport.group.get_group_store(), range(transport.world_size)
    store.set(_words_key(transport.rank), words.partition("\n")[0])
    await_words(transport, ranks)
    said = [index for index in ranks if store.check([_words_key(index)])]
    return WORDS_SEPARATOR.join(f"{index}: {store.get(_words_key(index)).decode()}" for index in said)


def _words_key(index: int) -> str:
    return f"verification/words of {index}"


def silence_abort() -> None:
    """Suppress the output and the core file of this rank, which gloo may abort. The rank is replaced in any case."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
