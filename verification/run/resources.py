"""What the operating system keeps for this process: open files, threads, memory that it shares with other processes."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter

PAGES = "/dev/shm/ring-"  # of the memory in which ranks of one machine agree
_TIMEOUT, _PAUSE = 2.0, 0.005  # seconds: a thread that was told to end may take a while


def in_use() -> Counter[str]:
    """By what it is: how many of it."""
    found = Counter(f"open file {_target(f'/proc/self/fd/{number}')}" for number in os.listdir("/proc/self/fd"))
    found.update(f"thread {_name(number)}" for number in os.listdir("/proc/self/task"))
    found.update(f"shared memory {page}" for page in pages())
    return found


def pages() -> list[str]:
    """The files of shared memory that this process has mapped, by name; one that has no name any more is "deleted"."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line[line.index(PAGES) :].rstrip("\n") for line in maps if PAGES in line]


def left_since(before: Counter[str]) -> list[str]:
    """What is in use and was not before, once all that was told to end has had time for it."""
    began = time.monotonic()
    while (more := in_use() - before) and time.monotonic() - began < _TIMEOUT:
        gc.collect()
        time.sleep(_PAUSE)
    return sorted(more)


def _target(path: str) -> str:
    """Numbers of sockets and pipes say nothing, and differ."""
    try:
        return os.readlink(path).partition(":[")[0]
    except OSError:  # that with which the folder was read
        return ""


def _name(number: str) -> str:
    try:
        with open(f"/proc/self/task/{number}/comm", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:  # it has ended
        return ""
