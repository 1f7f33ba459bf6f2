"""A pool of persistent ranks: one process each, joined by gloo or NCCL, reused for thousands of calls.

    with Pool(4, preload=("torch", "my_package.steps")) as pool:
        results = pool.run(steps.forward, case)         # one result per rank, in rank order

A rank that dies, raises or does not answer makes the call raise `RankCrash`, `RankError` (or `MismatchedMessages`)
or `RankHang` with every rank's stack. All ranks are then replaced, even those that answered: a message that nobody
received would otherwise reach a later call. Processes come from a forkserver that has already imported torch, so
replacing them takes a fraction of a second. No call is ever retried.

Needs Linux (/proc, memfd). Use a pool from one thread at a time.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from verification.failures import (
    MismatchedMessages,
    Raised,
    RankCrash,
    RankError,
    RankFailure,
    RankHang,
    RankState,
    name_exit,
    name_ranks,
)
from verification.run.processes.flight_record import analysis
from verification.run.processes.stacks import is_answering, tidy_stack
from verification.run.processes.worker import ANSWERED, REQUEST, STOPPED, LocalRanks, PoolError

__all__ = ["Pool", "PoolError", "Ticket"]

T = TypeVar("T")

START_TIMEOUT = 180.0  # seconds for all ranks to start, even on a loaded machine
GRACE = 0.3  # seconds after a rank raised, in which the others may raise or answer before they count as left waiting
_TOLD = ": there the "  # in the error of a rank that learned how a call ended on another
LISTEN = 0.02  # seconds to poll each of the other ranks when one has died
BUSY = 10.0  # the timeout is extended at most to this multiple while a rank computes, or waits for a processor


class RankSet(Protocol):
    """One generation of ranks, local or not: the part of `verification.run.processes.worker.Ranks` that pools use."""

    world_size: int

    @property
    def pids(self) -> tuple[int, ...]: ...
    def start(self) -> None: ...
    def send(self, messages: Sequence[bytes]) -> None: ...
    def events(self, timeout: float) -> list[tuple[int, bool]]: ...
    def receive(self, rank: int) -> tuple[int, int, bytes] | None: ...
    def has_answer(self, rank: int, timeout: float) -> bool: ...
    def is_dead(self, rank: int) -> bool: ...
    def exit_code(self, rank: int) -> int | None: ...
    def stacks(self, ranks: Collection[int]) -> dict[int, str]: ...
    def records(self, ranks: Collection[int]) -> dict[int, bytes]: ...
    def any_runnable(self, ranks: Collection[int]) -> bool: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Ticket:
    """A call under way, to be passed to `collect` once."""

    sequence: int
    name: str = field(compare=False)
    dead: tuple[int, ...] = ()  # ranks that had died since they answered the previous call


@dataclass
class _PoolCall:
    """The answers so far to one call."""

    waiting: set[int]
    waited: float = 0.0  # seconds
    results: dict[int, Any] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    died: set[int] = field(default_factory=set)


class Pool:
    """`world_size` ranks, ready when the constructor returns.

    Args:
        timeout: seconds that a call may take, counted from `collect`; `run` and `collect` can override it. Ten times as
            many while a rank that has not answered computes, or waits for a processor.
        preload: modules that the forkserver imports once, before any rank exists; "torch" among them.
        joined_by: "gloo", or "nccl", which needs a GPU for each rank.
        flight_records: add torch's analysis of the ranks' last collectives to a hang, which takes some seconds.

    Raises:
        ValueError: for bad arguments.
        PoolError: if the ranks do not start (a module was not preloaded, say).
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 30.0,
        preload: Sequence[str] = ("torch",),
        joined_by: str = "gloo",
        flight_records: bool = False,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size: got {world_size}; allowed is 1 or more")
        if timeout <= 0:
            raise ValueError(f"timeout: got {timeout}; allowed is a positive number of seconds")
        if isinstance(preload, str) or "torch" not in preload:
            raise ValueError(f'preload: got {preload!r}; allowed is a sequence of module names, "torch" among them')
        if joined_by not in ("gloo", "nccl"):
            raise ValueError(f'joined_by: got {joined_by!r}; allowed are "gloo" and "nccl"')
        self.world_size = world_size
        self.timeout = timeout
        self._joined_by, self._flight_records = joined_by, flight_records
        self.generation = 0  # number of sets of ranks started so far
        self._preload = tuple(preload)
        self._sequence = 0
        self._under_way: Ticket | None = None
        self._ranks: RankSet | None = None
        self._start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process identifiers, in rank order."""
        return self._open_ranks().pids

    def run(self, function: Callable[..., T], *args: Any, timeout: float | None = None) -> list[T]:
        """Submit a call and collect its results."""
        return self.collect(self.submit(function, *args), timeout=timeout)

    def submit(self, function: Callable[..., Any], *args: Any) -> Ticket:
        """Start `function(*args)` on every rank, and return without waiting.

        The function travels by name, so it must be importable; arguments and results travel by pickle.
        If an earlier call was never collected, the ranks are replaced first, and its answers are lost.

        Raises ValueError for a function of `__main__`, PoolError on a closed pool, errors of pickle before it sends.
        """
        ranks = self._open_ranks()
        if getattr(function, "__module__", None) == "__main__":
            raise ValueError(
                f"function: got {function!r} of __main__; allowed are functions of a module ranks can import"
            )
        pickled = pickle.dumps((function, args), protocol=5)
        if self._under_way is not None:
            ranks = self._start()
        self._sequence += 1
        dead = tuple(rank for rank, died in ranks.events(0.0) if died)
        ticket = Ticket(self._sequence, _qualified_name(function), dead)
        self._under_way = ticket
        ranks.send([REQUEST.pack(ticket.sequence) + pickled] * self.world_size)
        return ticket

    def collect(self, ticket: Ticket, *, timeout: float | None = None, last_words: float = 0.0) -> list[Any]:
        """Return every rank's result, in rank order.

        timeout: seconds from now; None for the pool's own. last_words: seconds that the others have to answer, or to
        raise, when a rank has died.

        Raises RankCrash, RankError, MismatchedMessages or RankHang, after replacing the ranks; ValueError for a ticket
        that was already collected or discarded, PoolError on a closed pool.
        """
        ranks = self._open_ranks()
        if ticket != self._under_way:
            raise ValueError(f"ticket: got {ticket}, which is not under way; allowed is {self._under_way}")
        timeout = self.timeout if timeout is None else timeout
        try:
            call = _await_answers(ranks, ticket, timeout)
            if call.died and last_words:
                _take_last_words(ranks, call, ticket.sequence, last_words)
            failed = bool(call.waiting or call.raised or call.died)
            failure = _diagnose(ranks, ticket, call, timeout) if failed else None
            if self._flight_records and isinstance(failure, RankHang):
                failure.add_note(analysis(ranks.records(range(self.world_size))))
        except BaseException as error:
            # Ctrl-C, or a result that cannot be unpickled: replace the ranks, so that no later call meets its remains.
            self._start_after(error)
            raise
        self._under_way = None
        if failure is None:
            return [call.results[rank] for rank in range(self.world_size)]
        self._start_after(failure)
        # Raise each kind on its own line: Hypothesis tells failures apart by line.
        if isinstance(failure, RankCrash):
            raise failure
        if isinstance(failure, MismatchedMessages):
            raise failure
        if isinstance(failure, RankError):
            raise failure
        raise failure

    def close(self) -> None:
        """End all ranks. Calling it again does nothing."""
        if self._ranks is not None:
            self._under_way = self._ranks = None
            self._end_ranks()

    def _open_ranks(self) -> RankSet:
        if self._ranks is None:
            raise PoolError("the pool is closed")
        return self._ranks

    def _start(self) -> RankSet:
        """Start new ranks in place of the present ones. Raises PoolError, and closes the pool, if they do not start."""
        self.close()
        self.generation += 1
        ranks = self._new_ranks()
        self._end_ranks = weakref.finalize(self, ranks.end)  # runs also when the pool is garbage, or at exit
        self._ranks = ranks
        try:
            ranks.start()
            ticket = Ticket(0, "joining the process group")
            call = _await_answers(ranks, ticket, START_TIMEOUT)
            if call.waiting or call.raised or call.died:
                raise PoolError(f"the ranks did not start\n{_diagnose(ranks, ticket, call, START_TIMEOUT)}")
        except BaseException:
            self.close()
            raise
        return ranks

    def _new_ranks(self) -> RankSet:
        return LocalRanks(self.world_size, self._preload, self.timeout, self._joined_by)

    def _start_after(self, failure: BaseException) -> None:
        try:
            self._start()
        except PoolError as error:
            raise PoolError(f"the ranks could not be replaced after the failure above: {error}") from failure


def _qualified_name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _await_answers(ranks: RankSet, ticket: Ticket, timeout: float) -> _PoolCall:
    """Take answers until all have arrived, a rank died, or the timeout or the grace after an exception is over.

    The timeout is wall time, and a loaded machine may leave ranks without a processor for long. So it is extended, up
    to BUSY times, while a rank that has not answered is runnable. Ranks that wait for each other are not.
    """
    call = _PoolCall(set(range(ranks.world_size)))
    began = time.monotonic()
    deadline, last = began + timeout, began + BUSY * timeout
    while call.waiting and not call.died:
        events = ranks.events(max(0.0, deadline - time.monotonic()))
        if not events:
            call.waited = time.monotonic() - began
            over = bool(call.raised) or time.monotonic() > last or not ranks.any_runnable(call.waiting)
            # A rank that answered since the last look is no longer runnable, but its answer is here.
            events = ranks.events(0.0) if over else []
            if over and not events:
                break
            deadline = time.monotonic() + timeout / 4
        for rank, dead in events:
            if not dead and rank in call.waiting:
                _take_answer(ranks, call, rank, ticket.sequence)
            elif dead and rank not in call.raised:  # a rank that cannot join its group raises, then exits
                call.died.add(rank)
        if call.raised:
            deadline = min(deadline, time.monotonic() + GRACE)
    return call


def _take_last_words(ranks: RankSet, call: _PoolCall, expected: int, seconds: float) -> None:
    """Take answers of the surviving ranks, which need this long to notice a death. After one did, the others follow."""
    end = time.monotonic() + seconds
    while (alive := call.waiting - call.died) and time.monotonic() < end:
        for rank in sorted(alive):
            if ranks.has_answer(rank, LISTEN):
                _take_answer(ranks, call, rank, expected)
                end = min(end, time.monotonic() + GRACE)


def _take_answer(ranks: RankSet, call: _PoolCall, rank: int, expected: int) -> None:
    received = ranks.receive(rank)
    if received is None:
        call.died.add(rank)
        return
    sequence, status, payload = received
    if sequence != expected:
        raise PoolError(f"rank {rank} answered call {sequence}, but call {expected} is under way")
    value = pickle.loads(payload)
    call.waiting.discard(rank)
    if status == ANSWERED:
        call.results[rank] = value
    else:
        call.raised[rank] = value


def _diagnose(ranks: RankSet, ticket: Ticket, call: _PoolCall, timeout: float) -> RankFailure:
    """Return the failure, with the state of every rank. Call it before the ranks are replaced."""
    stacks = ranks.stacks(call.waiting | call.died)
    if call.raised or call.died:
        for rank in sorted(call.waiting - call.died):
            # It may have raised because another rank ended; if it has left the call, wait for its answer.
            if ranks.has_answer(rank, GRACE if is_answering(stacks[rank]) else 0.0):
                _take_answer(ranks, call, rank, ticket.sequence)
    call.died |= {rank for rank in call.waiting if ranks.is_dead(rank)}
    call.waiting -= call.died
    states = [_state(ranks, call, rank, stacks) for rank in range(ranks.world_size)]
    where = f"in {ticket.name} (world of {ranks.world_size})"
    if call.died:
        died = "; ".join(f"rank {state.rank} {state.detail}" for state in states if state.outcome == "died")
        before = f" (it was dead before the call: {name_ranks(ticket.dead)})" if ticket.dead else ""
        return RankCrash(f"{died} {where}{before}", states)
    if call.raised:
        told = {rank for rank, raised in call.raised.items() if _TOLD in raised.headline}  # since another one failed
        failed = sorted(set(call.raised) - told or told)
        headline = f"{name_ranks(failed)} raised {where}: {call.raised[failed[0]].headline}"
        mismatched = any(raised.mismatched for raised in call.raised.values())
        return MismatchedMessages(headline, states) if mismatched else RankError(headline, states)
    longer = f", nor within {call.waited:.0f} s while it computed," if call.waited > 2 * timeout else ""
    stopped = [state.rank for state in states if state.outcome == "stopped"]
    why = f"; stopped by a signal: {name_ranks(stopped)}" if stopped else ""
    return RankHang(
        f"no answer within {timeout:g} s{longer} from {name_ranks(sorted(call.waiting))} {where}{why}", states
    )


def _state(ranks: RankSet, call: _PoolCall, rank: int, stacks: dict[int, str]) -> RankState:
    stack = tidy_stack(stacks.get(rank, ""))
    if rank in call.died:
        return RankState(rank, "died", name_exit(ranks.exit_code(rank)), stack)
    if rank in call.raised:
        return RankState(rank, "raised", f"raised {call.raised[rank].headline}", call.raised[rank].traceback)
    if rank in call.results:
        return RankState(rank, "answered", "had answered")
    if stack == STOPPED:
        return RankState(rank, "stopped", "was stopped by a signal, so it could write no stack")
    if not stack:
        return RankState(rank, "blocked", "had not answered, and wrote no stack: it is in the kernel")
    return RankState(rank, "blocked", "had not answered; it stood at", stack)
