"""The calls on a group are numbered, so that ranks that are not in the same call find out.

Messages match in the order in which they are posted. If ranks begin calls in another order, or one leaves out a
backward, messages of different calls would meet: wrong numbers, or a wait without end. So each forward on a group has a
number, its backwards go by the same number, and the ranks compare both before a tensor moves (`ring.consensus`).

One thread calls on a group, since nothing orders the calls of several threads in the same way on every rank. Where two
do, all that the first one had under way may have met calls of the second one elsewhere: it has no backward any more.

A call that ends in the middle, out of memory or interrupted, leaves messages under way, which would meet those of the
next call: nothing can be called on the group any more.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

KEPT = 256


@dataclass(eq=False)
class NumberedCall:
    """One forward on a group, with its backwards. name: what the caller calls it, the same on every rank."""

    calls: Calls
    number: int
    name: str | None
    backwards: int = 0  # that the ranks have begun together

    @property
    def forward(self) -> str:
        return f"the forward of {self}"

    @property
    def backward(self) -> str:
        """The next backward through this call: there are several where a graph is kept."""
        return self._backward(self.backwards + 1)

    @property
    def current_backward(self) -> str:
        """The backward that the ranks have begun last."""
        return self._backward(self.backwards)

    def _backward(self, number: int) -> str:
        return f"the backward of {self}" if number == 1 else f"backward {number} of {self}"

    def __str__(self) -> str:
        return f"call {self.number}" + ("" if self.name is None else f" ({self.name!r})")


@dataclass(eq=False)
class Calls:
    """The calls of one rank on one group, or on one transport that has no group."""

    _number: int = 0  # of the latest call
    _thread: threading.Thread | None = None  # the one that calls on this group
    _first: str = ""  # its first call
    _refused: int = 0  # the latest call that was refused since it came from a second thread
    _why: str = ""
    _questions: int = 0  # that all ranks of the group have answered together
    _broken: str = ""  # how a call ended in the middle
    _backward: dict[int, NumberedCall] = field(default_factory=dict)  # by number, the first one first
    _turn: threading.RLock = field(default_factory=threading.RLock)

    def turn(self) -> AbstractContextManager[object]:
        """One forward or backward at a time, as `with calls.turn():`. Another thread waits here, and is then refused by
        `check_thread`.

        Raises RuntimeError after a call that ended in the middle.
        """
        return self

    def __enter__(self) -> None:
        self._turn.acquire()
        if self._broken:
            self._turn.release()
            raise RuntimeError(f"nothing can be called on this group any more, since on this rank {self._broken}")

    def __exit__(self, *_: object) -> None:
        self._turn.release()

    def guard(self, what: str) -> _Guard:
        """Around what posts messages. what: in which call and direction."""
        return _Guard(self, what)

    def mark_broken(self, what: str, error: BaseException) -> None:
        self._broken = f"{what} ended in the middle: {type(error).__name__}: {error}".partition("\n")[0]

    def begin(self, name: str | None) -> NumberedCall:
        """The next call. Every call has a number, also one that is refused."""
        self._number += 1
        return NumberedCall(self, self._number, name)

    def get(self, number: int, name: str | None) -> NumberedCall:
        """The call of this number, for a backward that knows no more of it. How often a call went backward is known of
        the last KEPT calls.
        """
        if number not in self._backward:
            self._backward[number] = NumberedCall(self, number, name)
            if len(self._backward) > KEPT:
                del self._backward[next(iter(self._backward))]
        return self._backward[number]

    def check_thread(self, call: NumberedCall | str) -> None:
        """Raise ValueError if another thread, which still runs, calls on this group. call: one that has no number, by
        what it does.
        """
        if within_backward():  # what checkpointing computes again, in a thread of autograd
            return
        mine = threading.current_thread()
        if self._thread is None or not self._thread.is_alive():
            self._thread, self._first = mine, str(call)
        if self._thread is not mine:
            self._refused = self._number if isinstance(call, str) else call.number
            self._why = (
                f"calls on a group must come from one thread: got {call} from {mine.name!r}, and {self._first} from "
                f"{self._thread.name!r}, which still runs; allowed is a group of its own for each thread"
            )
            raise ValueError(self._why)

    def check_backward(self, call: NumberedCall) -> None:
        """Raise ValueError if since this call a second thread was refused: on another rank it may have been the first,
        and its call the one that met this one.
        """
        if call.number < self._refused:
            raise ValueError(f"{call} has no backward any more, since after it {self._why}")

    @property
    def number(self) -> int:
        """Of the latest call."""
        return self._number

    def next_question(self) -> int:
        """The number of the next question to all ranks, the same on each."""
        self._questions += 1
        return self._questions

    def advance_to(self, number: int) -> None:
        """Go on after this number, which the ranks have agreed on after they were found in different calls."""
        self._number = max(self._number, number)


@dataclass(eq=False)
class _Guard:
    """A context in which messages are under way."""

    calls: Calls
    what: str

    def __enter__(self) -> None:
        """Nothing to do yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.calls.mark_broken(self.what, error)


def within_backward() -> bool:
    """Whether autograd is at work in this thread."""
    return torch._C._current_graph_task_id() != -1
