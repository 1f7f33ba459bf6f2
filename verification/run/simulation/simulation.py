"""All ranks in one process, over a transport that does the worst that the contract of `ring.comm.transport` allows.

    answers = Simulation(4, seed=7).run(lambda transport: step(transport, ...))

- A receive buffer is overwritten as soon as it is posted. It is filled either as soon as both ends are posted or only
  when one of them waits, and the send buffer is read at that same moment. So code that reads, writes or posts a buffer
  before its wait is over (a receive buffer: before the message has arrived) computes wrong numbers or, where the
  simulation can tell, raises `BrokenContract`, which names the buffer and the hop.
- A call that sends from another place than it announced is `BrokenContract` (`verification.run.simulation.announced`).
- Batches that are never waited for, and buffers that share bytes while in flight, are `BrokenContract` too.
- Ranks run one at a time in an order that the seed decides (`verification.run.simulation.scheduler`): one is starved,
  or runs as far ahead as it can, or all take turns. A send is complete when its receive is posted or, if the seed
  decides so, at once.
- Where nobody can go on, `Deadlock` says who waits for whom.

The same seed gives the same run. Knows nothing of attention.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import torch

from ring.comm.transport import Message
from verification.failures import (
    BrokenContract,
    Deadlock,
    MismatchedMessages,
    RankError,
    RankFailure,
    RankState,
    name_ranks,
)
from verification.run.simulation.in_flight import Batch, InFlight, described
from verification.run.simulation.scheduler import Scheduler
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.wording import counted

T = TypeVar("T")
_FRAMES = 12  # of a rank's stack, the innermost


class Simulation:
    """`size` ranks. names: what they are called in reports (a group's global ranks); by default 0 .. size - 1."""

    def __init__(self, size: int, seed: int, names: Sequence[int] | None = None) -> None:
        self.size = size
        self.names = tuple(range(size)) if names is None else tuple(names)
        self.scheduler = Scheduler(size, seed)
        self.buffered = self.scheduler.random.random() < 0.25  # sends complete before their receive is posted
        self.transports = [SimulatedTransport(self, rank) for rank in range(size)]
        self._sends: dict[tuple[int, int], deque[InFlight]] = {}  # posted, not met by a receive: (from, to)
        self._receives: dict[tuple[int, int], deque[InFlight]] = {}
        self._collectives: list[_Collective] = []
        self._calls: list[Hashable] = []  # kinds of the calls that were prepared, in order
        self._waiting: dict[int, Batch | _Collective] = {}
        self._states: list[RankState] = []

    def run(self, function: Callable[[SimulatedTransport], T]) -> list[T]:
        """What `function` returned on each rank. Runs once.

        Raises Deadlock, BrokenContract, MismatchedMessages or, where a rank raised anything else, RankError.
        """

        def live(transport: SimulatedTransport) -> T:
            answer = function(transport)
            transport.check_all_waited()
            return answer

        scheduler = self.scheduler
        scheduler.on_stuck = self._describe_stuck
        scheduler.run([lambda t=transport: live(t) for transport in self.transports])  # type: ignore[misc]
        if scheduler.stuck or any(error is not None for error in scheduler.errors):
            raise self._failure()
        self._check_all_received()
        return scheduler.outcomes

    def _check_all_received(self) -> None:
        """Raises MismatchedMessages for a buffered message that nobody received: a later receive would take it."""
        for (source, target), ends in self._sends.items():
            for end in ends:
                raise MismatchedMessages(
                    f"{self.name(target)} never received {described(end.message)} from {self.name(source)}",
                    [RankState(name, "answered", "had answered") for name in self.names],
                )

    def pause(self, rank: int) -> None:
        """Perhaps other ranks go on first."""
        self.scheduler.pause(rank)

    def check_call(self, rank: int, number: int, key: Hashable) -> None:
        """Raises BrokenContract unless the number-th call of this rank is of the same kind as the others'."""
        if number == len(self._calls):
            self._calls.append(key)
        if self._calls[number] != key:
            raise BrokenContract(f"{self.name(rank)} prepares another kind of call than others do")

    # --- messages -----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Start a batch that a rank has posted: match its messages with those that wait for them."""
        batch.receives = [InFlight(message, batch, scribble=True) for message in receives]
        batch.sends = [InFlight(message, batch, scribble=False) for message in sends]
        batch.receiving = len(batch.receives)
        batch.open = batch.receiving + (0 if self.buffered else len(batch.sends))
        for end in batch.receives:
            self._match(end, self._sends, self._receives, (end.message.peer, batch.rank))
        for end in batch.sends:
            self._match(end, self._receives, self._sends, (batch.rank, end.message.peer))

    def _match(
        self,
        end: InFlight,
        partners: dict[tuple[int, int], deque[InFlight]],
        own: dict[tuple[int, int], deque[InFlight]],
        route: tuple[int, int],
    ) -> None:
        waiting = partners.get(route)
        if not waiting:
            own.setdefault(route, deque()).append(end)
            return
        partner = waiting.popleft()
        send, receive = (partner, end) if own is self._receives else (end, partner)
        self._check_pair(send.message, receive.message, route)
        send.partner, receive.partner = receive, send
        if send.delivered:  # it was buffered, and its wait is over
            self._fill(receive, send.expected)
        elif self.scheduler.random.random() < 0.5:
            self._deliver(send, receive)
        self._settle(receive.batch, receiving=1)
        if not self.buffered:
            self._settle(send.batch, receiving=0)

    def _settle(self, batch: Batch, receiving: int) -> None:
        """The batch waits for one end of a message less; receiving: 1 if that end is a receive."""
        batch.open -= 1
        batch.receiving -= receiving
        awaited = batch.receiving if batch.arriving else batch.open
        if not awaited and self._waiting.get(batch.rank) is batch:
            self.scheduler.wake(batch.rank)

    def _check_pair(self, send: Message, receive: Message, route: tuple[int, int]) -> None:
        same = (send.label, send.tensor.dtype, send.bytes) == (receive.label, receive.tensor.dtype, receive.bytes)
        if not same:
            raise MismatchedMessages(
                f"{self.name(route[0])} sends {described(send)} to {self.name(route[1])}, "
                f"which there meets the receive of {described(receive)}"
            )

    def _deliver(self, send: InFlight, receive: InFlight) -> None:
        """Read the one buffer, write the other: at any time between both posts and the end of either wait."""
        self._check_send(send)
        self._fill(receive, send.expected)
        send.delivered = True

    def _fill(self, receive: InFlight, bits: torch.Tensor) -> None:
        self._check_receive(receive)
        receive.bits.copy_(bits)
        receive.expected, receive.delivered = bits, True

    def receive(self, batch: Batch) -> None:
        """Write the receive buffers that were not written yet; from now on the rank may read them."""
        for end in batch.receives:
            if not end.delivered:
                assert end.partner is not None
                self._deliver(end.partner, end)
            self._check_receive(end)
        batch.received = True

    def finish(self, batch: Batch) -> None:
        """End of a wait: read and write what was not yet; from now on the buffers are the rank's own again."""
        if not batch.received:
            self.receive(batch)
        for end in batch.sends:
            self._check_send(end)
            if not end.delivered and end.partner is not None:
                self._deliver(end, end.partner)
            end.delivered = True  # or buffered: `expected` is the copy that its receive will get
        batch.over = True
        for end in (*batch.sends, *batch.receives):
            end.let_go()

    def _check_send(self, end: InFlight) -> None:
        if not end.batch.over and not end.intact:
            raise BrokenContract(
                f"{self.name(end.batch.rank)} changed the send buffer of {described(end.message)} "
                f"to {self.name(end.message.peer)} before its wait was over"
            )

    def _check_receive(self, end: InFlight) -> None:
        if not end.intact:
            raise BrokenContract(
                f"{self.name(end.batch.rank)} wrote to the receive buffer of {described(end.message)} "
                f"from {self.name(end.message.peer)} before its wait was over"
            )

    # --- all ranks together -------------------------------------------------------------------------------------------

    def collective(self, rank: int, number: int, kind: str, payload: bytes) -> list[bytes]:
        """The number-th collective call of this rank; returns what every rank gave once all have called."""
        if number == len(self._collectives):
            self._collectives.append(_Collective(kind, len(payload), [None] * self.size))
        collective = self._collectives[number]
        if (kind, len(payload)) != (collective.kind, collective.length):
            raise MismatchedMessages(
                f"{self.name(rank)} calls {kind} with {len(payload)} bytes where others call {collective.kind} "
                f"with {collective.length}"
            )
        collective.payloads[rank] = payload
        if None in collective.payloads:
            self.wait_for(rank, collective)
        else:
            for other in range(self.size):
                if self._waiting.get(other) is collective:
                    self.scheduler.wake(other)
        return [given for given in collective.payloads if given is not None]

    def wait_for(self, rank: int, reason: Batch | _Collective) -> None:
        self._waiting[rank] = reason
        self.scheduler.block(rank)
        del self._waiting[rank]

    # --- reports ------------------------------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        return f"rank {self.names[rank]}"

    def _describe_stuck(self) -> None:
        for rank in self.scheduler.stuck:
            awaited = "; ".join(text for _, text in self._awaited(rank))
            stack = _stack(self.scheduler.stacks[rank])
            self._states.append(RankState(self.names[rank], "blocked", f"waited for {awaited}, at", stack))

    def _awaited(self, rank: int) -> list[tuple[int, str]]:
        """Whom a blocked rank waits for, and what each of these would have to do."""
        reason = self._waiting[rank]
        if isinstance(reason, _Collective):
            missing = [other for other, payload in enumerate(reason.payloads) if payload is None]
            return [(other, f"{self.name(other)} to call {reason.kind}") for other in missing]
        found, sends = [], [] if self.buffered or reason.arriving else reason.sends
        for ends, verb in ((reason.receives, "send"), (sends, "receive")):
            for end in ends:
                if end.partner is None:
                    peer = end.message.peer
                    found.append((peer, f"{self.name(peer)} to {verb} {described(end.message)}"))
        return found

    def _failure(self) -> RankFailure:
        scheduler = self.scheduler
        # A stuck rank was told to end: what it raises then says nothing about why it was stuck.
        raised = [r for r, error in enumerate(scheduler.errors) if error is not None and r not in scheduler.stuck]
        states = {state.rank: state for state in self._states}
        for rank, name in enumerate(self.names):
            error = scheduler.errors[rank]
            if error is not None and rank in raised:
                said = _traceback(error) if not isinstance(error, RankFailure) else ""
                states[name] = RankState(name, "raised", f"raised {_headline(error)}", said)
            elif name not in states:
                states[name] = RankState(name, "answered", "had answered")
        ordered = [states[name] for name in self.names]
        if not raised:
            return Deadlock(f"deadlock of {counted(self.size, 'rank')}: {self._chain()}", ordered)
        first = scheduler.errors[raised[0]]
        assert first is not None
        kind = type(first) if isinstance(first, BrokenContract | MismatchedMessages) else RankError
        where = (
            f" (then {name_ranks(self.names[r] for r in scheduler.stuck)} waited in vain)" if scheduler.stuck else ""
        )
        return kind(f"{name_ranks(self.names[r] for r in raised)} raised: {_headline(first)}{where}", ordered)

    def _chain(self) -> str:
        """Who waits for whom, from one stuck rank on, until the chain closes or ends at a rank that had answered."""
        rank, seen = self.scheduler.stuck[0], []
        while rank in self.scheduler.stuck and rank not in seen:
            seen.append(rank)
            rank = self._awaited(rank)[0][0]
        if rank in seen:
            seen = [*seen[seen.index(rank) :], rank]
            return " waits for ".join(self.name(r) for r in seen)
        return " waits for ".join(self.name(r) for r in [*seen, rank]) + ", which had answered"


@dataclass(eq=False)
class _Collective:
    """One collective call of all ranks. payloads: None for a rank that has not called yet."""

    kind: str
    length: int
    payloads: list[bytes | None]


def _headline(error: BaseException) -> str:
    if isinstance(error, RankFailure):
        return error.headline
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _stack(frame: Any) -> str:
    """The innermost frames of what the rank runs, without those of the simulation itself."""
    begin = Scheduler._live.__code__  # the frame that calls the rank's function
    called = takewhile(lambda entry: entry[0].f_code is not begin, traceback.walk_stack(frame))
    inner = traceback.StackSummary.extract(called, limit=4 * _FRAMES)
    inner.reverse()
    kept = [entry for entry in inner if entry.filename not in _OWN_FILES]
    return "".join(traceback.StackSummary.from_list(kept[-_FRAMES:]).format())


def _traceback(error: BaseException) -> str:
    """From the rank's own function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


_OWN_FILES = {sys.modules[one.__module__].__file__ for one in (Simulation, SimulatedTransport, Scheduler)}
