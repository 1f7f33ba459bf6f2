"""All ranks in one process, over a transport that does the worst that the contract of `ring.comm.transport` allows.

    answers = Simulation(4, seed=7).run(lambda transport: step(transport, ...))

- A receive buffer is overwritten as soon as it is posted. It is filled either as soon as both ends are posted or only
  when one of them waits, and the send buffer is read at that same moment. So code that reads, writes or posts a buffer
  before its wait is over (a receive buffer: before the message has arrived) computes wrong numbers or, where the
  simulation can tell, raises `BrokenContract`, which names the buffer and the hop.
- A call that sends from another place than it announced (`verification.run.simulation.announced_sends`) raises
  `BrokenContract`.
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
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from verification.failures import (
    BrokenContract,
    Deadlock,
    MismatchedMessages,
    RankError,
    RankFailure,
    RankState,
    name_ranks,
)
from verification.run.simulation.eager_delivery import DeliveryPolicy
from verification.run.simulation.in_flight import Batch
from verification.run.simulation.scheduler import Scheduler
from verification.run.simulation.simulated_transport import Collective, SimulatedTransport, Wires
from verification.wording import counted

T = TypeVar("T")
_FRAMES = 12  # of a rank's stack, the innermost


class Simulation:
    """`size` ranks. names: what they are called in reports (a group's global ranks); by default 0 .. size - 1. prompt:
    in place of the worst, messages arrive at once, but for those that it holds back."""

    def __init__(
        self, size: int, seed: int, names: Sequence[int] | None = None, prompt: DeliveryPolicy | None = None
    ) -> None:
        self.size = size
        self.names = tuple(range(size)) if names is None else tuple(names)
        self.scheduler = Scheduler(size, seed)
        # Sends complete before their receive is posted.
        self.buffered = self.scheduler.random.random() < 0.25 and prompt is None
        self.prompt = prompt
        self.waiting: dict[int, tuple[Wires, Batch | Collective]] = {}
        self._whole = Wires(self, range(size))
        self._groups: dict[tuple[int, ...], Wires] = {}  # by their members
        self._states: list[RankState] = []

    def run(self, function: Callable[[SimulatedTransport], T]) -> list[T]:
        """What `function` returned on each rank. Runs once.

        Raises Deadlock, BrokenContract, MismatchedMessages or, where a rank raised anything else, RankError.
        """

        def live(transport: SimulatedTransport) -> T:
            answer = function(transport)
            for group in (self._whole, *self._groups.values()):
                if transport.rank in group.members:
                    group.transports[group.members.index(transport.rank)].check_all_waited()
            return answer

        scheduler = self.scheduler
        scheduler.on_stuck = self._describe_stuck
        scheduler.run([lambda t=transport: live(t) for transport in self._whole.transports])  # type: ignore[misc]
        if scheduler.stuck or any(error is not None for error in scheduler.errors):
            raise self._failure()
        for group in (self._whole, *self._groups.values()):
            lost = group.lost()
            if lost is not None:
                raise MismatchedMessages(lost, [RankState(name, "answered", "had answered") for name in self.names])
        return scheduler.outcomes

    def wires(self, members: tuple[int, ...]) -> Wires:
        if members not in self._groups:
            self._groups[members] = Wires(self, members)
        return self._groups[members]

    # --- reports ------------------------------------------------------------------------------------------------------

    def label(self, number: int) -> str:
        return f"rank {self.names[number]}"

    def _describe_stuck(self) -> None:
        for rank in self.scheduler.stuck:
            awaited = "; ".join(text for _, text in self._awaited(rank))
            stack = _stack(self.scheduler.stacks[rank])
            self._states.append(RankState(self.names[rank], "blocked", f"waited for {awaited}, at", stack))

    def _awaited(self, number: int) -> list[tuple[int, str]]:
        return self.waiting[number][0].awaited(self.waiting[number][1])

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
        stuck = name_ranks(self.names[r] for r in scheduler.stuck)
        where = f" (then {stuck} waited in vain)" if scheduler.stuck else ""
        return kind(f"{name_ranks(self.names[r] for r in raised)} raised: {_headline(first)}{where}", ordered)

    def _chain(self) -> str:
        """Who waits for whom, from one stuck rank on, until the chain closes or ends at a rank that had answered."""
        rank, seen = self.scheduler.stuck[0], []
        while rank in self.scheduler.stuck and rank not in seen:
            seen.append(rank)
            rank = self._awaited(rank)[0][0]
        if rank in seen:
            seen = [*seen[seen.index(rank) :], rank]
            return " waits for ".join(self.label(r) for r in seen)
        return " waits for ".join(self.label(r) for r in [*seen, rank]) + ", which had answered"


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
