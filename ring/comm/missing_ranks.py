"""Waits for a collective operation of a group, and names the ranks that do not come.

The error of a failed operation names a connection, not a rank. So a rank that has waited for a second leaves a mark in
the group's store. After the timeout it reads the marks: ranks without one did not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ring.comm.transport import MissingRanks

SLOW = 1.0  # seconds before a rank leaves its mark
GRACE = 1.5  # seconds in which ranks that came at the last moment leave theirs

Done = Callable[[float], bool]  # True if done within this many seconds; raises RuntimeError after the group's timeout


def wait_for_all(
    done: Done, group: dist.ProcessGroup, number: int, note: Callable[[], MissingRanks | None] = lambda: None
) -> None:
    """Return once the operation is done. number: of the operation on this group, the same on every rank. note: reads
    the note of a rank that has given up.

    Raises MissingRanks after the group's timeout, or when a connection fails.
    """
    try:
        if done(SLOW):
            return
        marks = Marks(group, number)
        marks.leave()
        while (said := note()) is None:
            if done(SLOW):
                marks.remove()
                return
    except RuntimeError as error:
        said = note() or MissingRanks(_missing(group, number), str(error).partition("\n")[0])
    raise said


def _missing(group: dist.ProcessGroup, number: int) -> list[int] | None:
    """Ranks that left no mark; None if the store, which a rank may serve, cannot be reached."""
    marks = Marks(group, number)
    marks.leave()
    time.sleep(GRACE)
    return marks.missing()


class Marks:
    """The marks of one operation: a key in the group's store for each rank that waits.

    Errors of the store are ignored: the operation itself may still complete.
    """

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self._store, self._number = group.get_group_store(), number
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    def leave(self) -> None:
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), "waits")

    def remove(self) -> None:
        with suppress(RuntimeError):
            self._store.delete_key(self._key(self._rank))

    def missing(self) -> list[int] | None:
        with suppress(RuntimeError):
            return [rank for rank in range(self._world_size) if not self.has(rank)]
        return None

    def _key(self, rank: int) -> str:
        return f"ring/waits/{self._number}/{rank}"

    def has(self, rank: int) -> bool:
        """Return True if a rank has left its mark."""
        return self._store.check([self._key(rank)])


def done_by_work(work: dist.Work) -> Done:
    """Done for gloo, whose work itself fails after the group's timeout."""

    def done(seconds: float) -> bool:
        try:
            return bool(work.wait(timedelta(seconds=seconds)))
        except RuntimeError:
            return work.is_completed() and bool(work.wait())  # raises if it failed

    return done


def done_by_event(event: torch.cuda.Event, timeout: timedelta) -> Done:
    """Done for NCCL. Poll: if a rank does not come, `event.synchronize` would never return."""

    # End before NCCL's watchdog, which would end the process.
    last = time.monotonic() + 0.9 * timeout.total_seconds()

    def done(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not event.query():
            now = time.monotonic()
            if now > last:
                raise RuntimeError(f"the group's timeout of {timeout} is over")
            if now > end:
                return False
            time.sleep(0.0)
        return True

    return done


def read_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of the group's GPU backend if it has one, else of its CPU backend."""
    device = "cuda" if "cuda" in dist.get_backend_config(group) else "cpu"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout
