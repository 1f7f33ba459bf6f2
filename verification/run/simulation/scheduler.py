"""Ranks as threads of one process, of which one runs at a time, in an order that depends on a seed.

Each rank has a lock, its baton, and runs only while it holds it. A rank lets others run in `pause` (it could go on),
in `block` (it cannot go on until another rank calls `wake`), and when it ends. If no rank can go on, postponed steps
are taken until one can. If none are left and not all ranks have ended, the blocked ones are stuck for good, which is
found at once, without a clock. Ranks are threads, not coroutines, since the code under test is ordinary code under an
autograd engine that keeps its state per thread.

This module knows nothing of messages: `verification.run.simulation.simulation` knows why a rank is blocked.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

# Choices of the next rank among those that could go on.
POLICIES = ("any", "starve", "deepest", "in turn")


class Abandoned(BaseException):
    """Unwinds a rank that can never go on. Not an `Exception`, so that code under test does not catch it."""


class Scheduler:
    """A run of one function per rank; the same seed gives the same interleaving.

    outcomes: results by rank, or None. errors: exceptions by rank, or None. stuck: ranks that were blocked when none
    could go on. stacks: frames of blocked ranks. stopped: ranks that were stopped before they ended.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = self.random.choice(POLICIES)
        self.victim = self.random.randrange(size)  # of "starve": it runs when nobody else can
        self.outcomes: list[Any] = [None] * size
        self.errors: list[BaseException | None] = [None] * size
        self.stuck: tuple[int, ...] = ()
        self.stacks: dict[int, FrameType] = {}
        self.stopped: set[int] = set()
        self.on_stuck: Callable[[], None] = lambda: None  # called once, before any stuck rank is unwound
        self._batons = [threading.Lock() for _ in range(size)]
        self._runnable = list(range(size))
        self._blocked: set[int] = set()
        self._postponed: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []
        self._all_ended = threading.Lock()
        self._running = size
        self._abandoned = False

    def run(self, functions: Sequence[Callable[[], Any]]) -> None:
        """Run the functions, one for each rank, until all have ended or are stuck. Exceptions go into `errors`."""
        self._all_ended.acquire()
        for rank, function in enumerate(functions):
            self._batons[rank].acquire()
            name = f"simulated rank {rank}"
            self._threads.append(threading.Thread(target=self._run_rank, args=(rank, function), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        self._batons[self._pick()].release()
        self._all_ended.acquire()
        for thread in self._threads:
            thread.join()

    def pause(self, rank: int) -> None:
        """Perhaps let other ranks go first. Called by the running rank. Raises Abandoned if the others are stuck."""
        if self._abandoned:
            raise Abandoned  # cleanup code can no longer talk to other ranks
        if self._runnable and self.random.random() < 0.5:
            self._runnable.append(rank)
            self._pass_on(rank)

    def block(self, rank: int) -> None:
        """Wait until `wake(rank)` is called. Called by the running rank. Raises Abandoned if that cannot happen."""
        if self._abandoned:
            raise Abandoned
        self._blocked.add(rank)
        # Before Python 3.11.9 sys._current_frames() can collect garbage, and deadlock with a thread that ends
        # (python/cpython#106883).
        self.stacks[rank] = sys._getframe()
        self._pass_on(rank)
        del self.stacks[rank]

    def wake(self, rank: int) -> None:
        """Let a rank go on if it is blocked. Called by the running rank."""
        if rank in self._blocked and rank not in self.stopped and not self._abandoned:
            self._blocked.remove(rank)
            self._runnable.append(rank)

    def postpone(self, step: Callable[[], None]) -> None:
        """Call `step`, which may wake ranks, once no rank can go on. The seed chooses among several such steps."""
        self._postponed.append(step)

    def stop(self, rank: int, ranks: Sequence[int]) -> NoReturn:
        """Never let these ranks go on. Called by the running rank, one of them. Raises Abandoned, at the end."""
        if not self._abandoned:
            paused = set(ranks) & set(self._runnable)
            self._runnable = [other for other in self._runnable if other not in paused]
            self._blocked |= paused
            self.stopped |= {rank} | set(ranks) & self._blocked
        self.block(rank)
        raise Abandoned

    def _run_rank(self, rank: int, function: Callable[[], Any]) -> None:
        self._batons[rank].acquire()
        try:
            if not self._abandoned:
                self.outcomes[rank] = function()
        except Abandoned:
            pass
        except BaseException as error:
            self.errors[rank] = error
        self._end()

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._all_ended.release()
        elif self._abandoned or not self._any_runnable():
            self._give_up()
        else:
            self._batons[self._pick()].release()

    def _any_runnable(self) -> bool:
        """Return True if some rank can go on, if need be after postponed steps."""
        while self._postponed and not self._runnable:
            self._postponed.pop(self.random.randrange(len(self._postponed)))()
        return bool(self._runnable)

    def _pass_on(self, rank: int) -> None:
        if self._any_runnable():
            next_rank = self._pick()
            if next_rank == rank:
                return
            self._batons[next_rank].release()
        else:
            self._give_up()
        self._batons[rank].acquire()
        if self._abandoned:
            raise Abandoned

    def _give_up(self) -> None:
        """Unwind the blocked ranks one by one; each starts the next when it ends."""
        if not self._abandoned:
            self._abandoned = True
            self.stuck = tuple(sorted(self._blocked - self.stopped))
            self.on_stuck()
            self.stacks = {}  # frames keep their variables alive
        self._batons[self._blocked.pop()].release()

    def _pick(self) -> int:
        ranks, index = self._runnable, 0
        if self.policy == "any" or (self.policy == "starve" and len(ranks) > 1):
            index = self.random.randrange(len(ranks))
            if self.policy == "starve" and ranks[index] == self.victim:
                index = (index + 1) % len(ranks)
        elif self.policy == "deepest":
            index = len(ranks) - 1
        return ranks.pop(index)
