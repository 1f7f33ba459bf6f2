"""All ranks in one process, over a transport that does the worst that the contract of `ring.comm.transport` allows.

    answers = Simulation(4, seed=7).run(lambda transport: step(transport, ...))

- A receive buffer is scribbled over as soon as it is posted, and filled either as soon as both ends are there or only
  when one of them waits; a send buffer is read at that same moment. So whoever reads, writes or posts a buffer before
  its wait is over (for a receive buffer, before it has arrived) gets wrong numbers or, where the simulation can tell,
  `BrokenContract`: which buffer, which hop.
- A call that sends from elsewhere than it told beforehand is `BrokenContract`
(`verification.run.simulation.announced`).
- Batches that are never waited for, and buffers that share bytes while in flight, are `BrokenContract` too.
- Ranks run one at a time in an order that the seed decides (`verification.run.simulation.scheduler`): one is starved,
or runs as far
  ahead as it can, or all take turns. A send is complete when its receive is posted or, as the seed decides, at once.
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
        self._assemblies: list[_Assembly] = []
        self.calls: list[Hashable] = []  # kinds of the calls that were prepared, in order
        self._waiting: dict[int, Batch | _Assembly] = {}
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
        """What was buffered has been taken by its receiver: such a message would meet a later receive."""
        for (source, target), flights in self._sends.items():
            for flight in flights:
                raise MismatchedMessages(
                    f"{self.name(target)} never received {described(flight.message)} from {self.name(source)}",
                    [RankState(name, "answered", "had answered") for name in self.names],
                )

    # --- messages -----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Take a batch off a rank's hands: match its messages with those that wait for them."""
        batch.receives = [InFlight(message, batch, scribble=True) for message in receives]
        batch.sends = [InFlight(message, batch, scribble=False) for message in sends]
        batch.landing = len(batch.receives)
        batch.open = batch.landing + (0 if self.buffered else len(batch.sends))
        for flight in batch.receives:
            self._meet(flight, self._sends, self._receives, (flight.message.peer, batch.rank))
        for flight in batch.sends:
            self._meet(flight, self._receives, self._sends, (batch.rank, flight.message.peer))

    def _meet(
        self,
        flight: InFlight,
        partners: dict[tuple[int, int], deque[InFlight]],
        own: dict[tuple[int, int], deque[InFlight]],
        road: tuple[int, int],
    ) -> None:
        waiting = partners.get(road)
        if not waiting:
            own.setdefault(road, deque()).append(flight)
            return
        partner = waiting.popleft()
        send, receive = (partner, flight) if own is self._receives else (flight, partner)
        self._check_pair(send.message, receive.message, road)
        send.partner, receive.partner = receive, send
        if send.delivered:  # it was buffered, and its wait is over
            self._fill(receive, send.expected)
        elif self.scheduler.random.random() < 0.5:
            self._deliver(send, receive)
        self._settle(receive.batch, landing=1)
        if not self.buffered:
            self._settle(send.batch, landing=0)

    def _settle(self, batch: Batch, landing: int) -> None:
        """One flight less to wait for."""
        batch.open -= 1
        batch.landing -= landing
        awaited = batch.landing if batch.arriving else batch.open
        if not awaited and self._waiting.get(batch.rank) is batch:
            self.scheduler.wake(batch.rank)

    def _check_pair(self, send: Message, receive: Message, road: tuple[int, int]) -> None:
        same = (send.label, send.tensor.dtype, send.bytes) == (receive.label, receive.tensor.dtype, receive.bytes)
        if not same:
            raise MismatchedMessages(
                f"{self.name(road[0])} sends {described(send)} to {self.name(road[1])}, "
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

    def land(self, batch: Batch) -> None:
        """Receive buffers that were not written yet are now, and the rank has them back."""
        for flight in batch.receives:
            if not flight.delivered:
                assert flight.partner is not None
                self._deliver(flight.partner, flight)
            self._check_receive(flight)
        batch.landed = True

    def finish(self, batch: Batch) -> None:
        """End of a wait: what was not read or written yet is now, and the rank has its buffers back."""
        if not batch.landed:
            self.land(batch)
        for flight in batch.sends:
            self._check_send(flight)
            if not flight.delivered and flight.partner is not None:
                self._deliver(flight, flight.partner)
            flight.delivered = True  # or buffered: `expected` is the copy that its receive will get
        batch.over = True
        for flight in (*batch.sends, *batch.receives):
            flight.let_go()

    def _check_send(self, flight: InFlight) -> None:
        if not flight.batch.over and not flight.intact:
            raise BrokenContract(
                f"{self.name(flight.batch.rank)} changed the send buffer of {described(flight.message)} "
                f"to {self.name(flight.message.peer)} before its wait was over"
            )

    def _check_receive(self, flight: InFlight) -> None:
        if not flight.intact:
            raise BrokenContract(
                f"{self.name(flight.batch.rank)} wrote to the receive buffer of {described(flight.message)} "
                f"from {self.name(flight.message.peer)} before its wait was over"
            )

    # --- all ranks together -------------------------------------------------------------------------------------------

    def join(self, rank: int, number: int, kind: str, payload: bytes) -> list[bytes]:
        """The number-th time that this rank meets all others; returns once all have come."""
        if number == len(self._assemblies):
            self._assemblies.append(_Assembly(kind, len(payload), [None] * self.size))
        assembly = self._assemblies[number]
        if (kind, len(payload)) != (assembly.kind, assembly.length):
            raise MismatchedMessages(
                f"{self.name(rank)} calls {kind} with {len(payload)} bytes where others call {assembly.kind} "
                f"with {assembly.length}"
            )
        assembly.payloads[rank] = payload
        if None in assembly.payloads:
            self.wait_for(rank, assembly)
        else:
            for other in range(self.size):
                if self._waiting.get(other) is assembly:
                    self.scheduler.wake(other)
        return [given for given in assembly.payloads if given is not None]

    def wait_for(self, rank: int, reason: Batch | _Assembly) -> None:
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
        if isinstance(reason, _Assembly):
            missing = [other for other, payload in enumerate(reason.payloads) if payload is None]
            return [(other, f"{self.name(other)} to call {reason.kind}") for other in missing]
        found, sends = [], [] if self.buffered or reason.arriving else reason.sends
        for flights, verb in ((reason.receives, "send"), (sends, "receive")):
            for flight in flights:
                if flight.partner is None:
                    peer = flight.message.peer
                    found.append((peer, f"{self.name(peer)} to {verb} {described(flight.message)}"))
        return found

    def _failure(self) -> RankFailure:
        scheduler = self.scheduler
        # What a rank raises once it is stuck is of its own making: it was told to end, and did not.
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
class _Assembly:
    """One meeting of all ranks."""

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
    begin = Scheduler._live.__code__  # where a rank's thread comes from its own beginnings to the rank's function
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
