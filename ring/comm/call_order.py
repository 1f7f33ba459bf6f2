"""Numbers the calls on a group so that ranks can detect when they are in different calls.

Messages match in the order in which they are posted. If ranks call in different orders, or one skips a backward,
messages of different calls would match: wrong results, or a hang. So each forward on a group has a number, which its
backwards share. The ranks compare call and direction before a tensor moves (`ring.consensus`).

Only one thread may call on a group, because nothing orders the calls of two threads alike on every rank. If two race,
messages of the first thread's calls may have matched the second's on another rank: those calls cannot run backward.

A call that is interrupted, or runs out of memory, leaves messages in flight, and other ranks that wait for this one:
the group refuses all later calls, and the others are told. So do the groups of its parent in a forked process, whose
messages would be taken for the parent's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import _StopRecomputationError

MAX_CALLS = 256


@dataclass(eq=False)
class NumberedCall:
    """One forward on a group, with its backwards. name: the caller's label for it, the same on every rank."""

    calls: Calls
    number: int
    name: str | None
    backwards: int = 0  # begun by all ranks together

    @property
    def forward(self) -> str:
        return f"the forward of {self}"

    @property
    def backward(self) -> str:
        """The next backward of this call; there are several with `retain_graph=True`."""
        return f"backward {self.backwards + 1} of {self}" if self.backwards else f"the backward of {self}"

    def __str__(self) -> str:
        return f"call {self.number}" + ("" if self.name is None else f" ({self.name!r})")


@dataclass(eq=False)
class Calls:
    """The calls of one rank on one group, or on one transport that has no group.

    tell: tells the other ranks how a call was interrupted, and by which error. under_way: see `enter`.
    """

    tell: Callable[[str, BaseException], None] | None = None
    under_way: str = ""
    _number: int = 0  # of the latest call
    _thread: threading.Thread | None = None  # the only one that may call on this group
    _first: str = ""  # of that thread
    _last_refused: int = 0  # number of the latest call from a second thread
    _refusal: str = ""  # the error of that call
    _rounds: int = 0  # of consensus, over all ranks of the group
    _broken: str = ""  # how a call was interrupted
    _depth: int = 0  # times that the thread holds the lock
    _by_number: dict[int, NumberedCall] = field(default_factory=dict)  # calls that `get` returned, oldest first
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def lock(self) -> AbstractContextManager[object]:
        """Allow one forward or backward at a time: `with calls.lock():`. A second thread waits here; `check_thread`
        then refuses it.

        Raises RuntimeError after an interrupted call.
        """
        return self

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._broken:
            self._lock.release()
            raise RuntimeError(f"nothing can be called on this group any more, since on this rank {self._broken}")
        self._depth += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and self.under_way and not isinstance(error, _StopRecomputationError):
                self.mark_broken(self.under_way, error)
        finally:
            self._depth -= 1
            if not self._depth:
                self.under_way = ""
            self._lock.release()

    def enter(self, where: str) -> None:
        """Have any error mark the group broken until the lock ends. where: the call and its direction; "" if no rank
        waits for this one.
        """
        self.under_way = where

    def mark_broken(self, where: str, error: BaseException) -> None:
        """Refuse all later calls, and tell the other ranks once."""
        if not self._broken:
            text = f"{where} ended in the middle: {type(error).__name__}: {error}"
            self._broken = text.partition("\n")[0].removesuffix(": ")
            if self.tell is not None:
                self.tell(self._broken, error)

    def forbid(self, reason: str) -> None:
        """Refuse all later calls. A thread of another process may hold the lock: a new one takes its place."""
        self._lock, self._broken = threading.RLock(), reason

    def begin(self, name: str | None, world_size: int = 1) -> NumberedCall:
        """Number the next call, and enter it if several ranks make it. Refused calls are numbered too."""
        self._number += 1
        if world_size > 1:
            self.enter(f"the forward of call {self._number}")
        return NumberedCall(self, self._number, name)

    def get(self, number: int, name: str | None) -> NumberedCall:
        """Look up one of the last MAX_CALLS by number, for a backward that has only the number."""
        if number not in self._by_number:
            self._by_number[number] = NumberedCall(self, number, name)
            if len(self._by_number) > MAX_CALLS:
                del self._by_number[next(iter(self._by_number))]
        return self._by_number[number]

    def check_thread(self, call: NumberedCall | str) -> None:
        """Raise ValueError if another thread that still runs calls on this group. call: it, or its description."""
        if within_backward():  # autograd's threads recompute checkpointed forwards
            return
        mine = threading.current_thread()
        if self._thread is None or not self._thread.is_alive():
            self._thread, self._first = mine, str(call)
        if self._thread is not mine:
            self._last_refused = self._number if isinstance(call, str) else call.number
            self._refusal = (
                f"calls on a group must come from one thread: got {call} from {mine.name!r}, and {self._first} from "
                f"{self._thread.name!r}, which still runs; give each thread its own group"
            )
            raise ValueError(self._refusal)

    def check_backward(self, call: NumberedCall) -> None:
        """Raise ValueError if a second thread was refused after this call: on another rank that thread may have come
        first, and its messages may have matched this call's.
        """
        if call.number < self._last_refused:
            raise ValueError(f"{call} has no backward any more, since after it {self._refusal}")

    @property
    def number(self) -> int:
        """Number of the latest call."""
        return self._number

    @property
    def is_of_another_thread(self) -> bool:
        """True if another thread that still runs calls on this group."""
        return self._thread not in (None, threading.current_thread()) and self._thread.is_alive()

    @property
    def rounds(self) -> int:
        """Number of the latest round of consensus."""
        return self._rounds

    def next_round(self) -> int:
        """Number of the next round of consensus, the same on every rank."""
        self._rounds += 1
        return self._rounds

    def advance_to(self, number: int) -> None:
        """Continue after this number, on which the ranks agreed after they had diverged."""
        self._number = max(self._number, number)


def within_backward() -> bool:
    """Return True if autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1
