"""All ranks in one process, over a transport that does the worst that the contract of `ring.comm.transport` allows.

    answers = Simulation(4, seed=7).run(lambda transport: step(transport, ...))

- A receive buffer is overwritten as soon as it is posted. It is filled either when both ends are posted or only when
  one of them waits, and the send buffer is read at that same moment. So code that uses a buffer before its wait is over
  (a receive buffer: before the message has arrived) computes wrong numbers or, where the simulation can tell, raises
  `BrokenContract`, which names the buffer and the hop.
- `BrokenContract` is also raised for a call that sends from another place than it announced
  (`verification.run.simulation.announced_sends`), batches that are never waited for, and buffers that share bytes
  while in flight.
- Ranks run one at a time in an order that depends on the seed (`verification.run.simulation.scheduler`): one is
  starved, or runs as far ahead as it can, or all take turns. A send is complete when its receive is posted or, for some
  seeds, at once.
- Ranks may be on several hosts. A message or a collective between hosts completes only when no rank can go on without
  it, and in any order. Its receive buffer is filled at its own wait, never earlier. So code that relies on the order in
  which messages of different peers arrive is found, whatever the seed.
- If no rank can go on, `Deadlock` names the chain of ranks that wait for each other.
- `SimulatedTransport.stop_host` stops all ranks of a host in the middle of a call. `Deadlock` then names the host and
  its ranks, even if all others have answered.

The same seed gives the same run. Nothing here depends on attention.
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
from verification.run.simulation.simulated_transport import Collective, Network, SimulatedTransport
from verification.wording import counted

T = TypeVar("T")
_FRAMES = 12  # of a rank's stack, the innermost


class Simulation:
    """A simulation of `size` ranks.

    names: numbers in reports (a group's global ranks); by default 0 .. size - 1. delivery: with a policy, messages
    arrive at once, between hosts too, except those that it holds back. hosts: their number, which divides the size;
    each has as many ranks, in order."""

    def __init__(
        self, size: int, seed: int, names: Sequence[int] | None = None, delivery: DeliveryPolicy | None = None,
        hosts: int = 1,
    ) -> None:  # fmt: skip
        self.size = size
        if hosts < 1 or size % hosts:
            raise ValueError(f"hosts must divide the {counted(size, 'rank')}, got {hosts}")
        self.hosts = tuple(rank * hosts // size for rank in range(size))
        self.names = tuple(range(size)) if names is None else tuple(names)
        self.scheduler = Scheduler(size, seed)
        # Sends complete before their receive is posted.
        self.buffered = self.scheduler.random.random() < 0.25 and delivery is None
        self.delivery = delivery
        self.waiting: dict[int, tuple[Network, Batch | Collective]] = {}
        self._whole = Network(self, range(size))
        self._groups: dict[tuple[int, ...], Network] = {}  # by their members
        self._states: list[RankState] = []

    def run(self, function: Callable[[SimulatedTransport], T]) -> list[T]:
        """Run `function` on each rank, and return the results. Use it once.

        Raises Deadlock, BrokenContract, MismatchedMessages or, for any other exception of a rank, RankError.
        """

        def run_rank(transport: SimulatedTransport) -> T:
            answer = function(transport)
            for group in (self._whole, *self._groups.values()):
                if transport.rank in group.members:
                    group.transports[group.members.index(transport.rank)].check_all_waited()
            return answer

        scheduler = self.scheduler
        scheduler.on_stuck = self._describe_stuck
        scheduler.run([lambda t=transport: run_rank(t) for transport in self._whole.transports])  # type: ignore[misc]
        if scheduler.stuck or scheduler.stopped or any(error is not None for error in scheduler.errors):
            raise self._failure()
        for group in (self._whole, *self._groups.values()):
            error = group.unreceived()
            if error is not None:
                raise MismatchedMessages(error, [RankState(name, "answered", "had answered") for name in self.names])
        return scheduler.outcomes

    def network(self, members: tuple[int, ...]) -> Network:
        if members not in self._groups:
            self._groups[members] = Network(self, members)
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
        # Ignore errors of stuck ranks: they come from unwinding them, and say nothing about why they were stuck.
        unwound = scheduler.stopped.union(scheduler.stuck)
        raised = [r for r, error in enumerate(scheduler.errors) if error is not None and r not in unwound]
        states = {state.rank: state for state in self._states}
        for rank in scheduler.stopped:
            states[self.names[rank]] = RankState(self.names[rank], "stopped", f"stopped with host {self.hosts[rank]}")
        for rank, name in enumerate(self.names):
            error = scheduler.errors[rank]
            if error is not None and rank in raised:
                trace = _traceback(error) if not isinstance(error, RankFailure) else ""
                states[name] = RankState(name, "raised", f"raised {_headline(error)}", trace)
            elif name not in states:
                states[name] = RankState(name, "answered", "had answered")
        ordered = [states[name] for name in self.names]
        if not raised:
            hosts = sorted({self.hosts[rank] for rank in scheduler.stopped})
            causes = [f"host {host} stopped, {self._stopped_on(host)}" for host in hosts]
            causes += [f"deadlock of {counted(self.size, 'rank')}: {self._chain()}"] if scheduler.stuck else []
            return Deadlock("; ".join(causes), ordered)
        first = scheduler.errors[raised[0]]
        assert first is not None
        kind = type(first) if isinstance(first, BrokenContract | MismatchedMessages) else RankError
        stuck = name_ranks(self.names[r] for r in scheduler.stuck)
        where = f" (then {stuck} waited in vain)" if scheduler.stuck else ""
        return kind(f"{name_ranks(self.names[r] for r in raised)} raised: {_headline(first)}{where}", ordered)

    def _stopped_on(self, host: int) -> str:
        return name_ranks(self.names[rank] for rank in sorted(self.scheduler.stopped) if self.hosts[rank] == host)

    def _chain(self) -> str:
        """Describe the chain of waiting ranks, from a stuck one until it closes, or ends at one that does not wait."""
        rank, chain = self.scheduler.stuck[0], []
        while rank in self.scheduler.stuck and rank not in chain:
            chain.append(rank)
            rank = self._awaited(rank)[0][0]
        if rank in chain:
            chain = [*chain[chain.index(rank) :], rank]
            return " waits for ".join(self.label(r) for r in chain)
        had = "stopped" if rank in self.scheduler.stopped else "answered"
        return " waits for ".join(self.label(r) for r in [*chain, rank]) + f", which had {had}"


def _headline(error: BaseException) -> str:
    if isinstance(error, RankFailure):
        return error.headline
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _stack(frame: Any) -> str:
    """Format the innermost frames of the rank's function, without those of the simulation itself."""
    begin = Scheduler._run_rank.__code__  # the frame that calls the rank's function
    called = takewhile(lambda entry: entry[0].f_code is not begin, traceback.walk_stack(frame))
    inner = traceback.StackSummary.extract(called, limit=4 * _FRAMES)
    inner.reverse()
    foreign = [entry for entry in inner if entry.filename not in _OWN_FILES]
    return "".join(traceback.StackSummary.from_list(foreign[-_FRAMES:]).format())


def _traceback(error: BaseException) -> str:
    """Format the traceback from the rank's own function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


_OWN_FILES = {sys.modules[cls.__module__].__file__ for cls in (Simulation, SimulatedTransport, Scheduler)}
