"""The descendants of a process, and which processes run, read from /proc (Linux only)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Return its children, their children and so on, including zombies."""
    pids: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # the process, or a thread of it, has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                pids |= {int(child)} | descendants(int(child))
    return pids


def alive(pids: Iterable[int]) -> set[int]:
    """Return those of the processes that run or are stopped. One that was killed holds its locks until the last of its
    threads has ended, after its first is a zombie."""
    return {pid for pid in pids if any(state not in "ZX" for state in _thread_states(pid))}


def _thread_states(pid: int) -> Iterator[str]:
    """Yield the state of each thread, as proc(5) has it; none for a process that has ended."""
    for file in Path("/proc").glob(f"{pid}/task/*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            yield file.read_text().rpartition(")")[2].split()[0]
