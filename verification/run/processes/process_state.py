"""Is a process runnable, or stopped? Read from /proc (Linux only)."""

from __future__ import annotations

import os
from contextlib import suppress

AUTOGRAD = "pt_autograd_"  # begins the names of torch's threads for backwards, one for each GPU


def is_runnable(pid: int) -> bool:
    """True if a Python thread of the process runs, or would if it had a processor.

    Only threads with the process's name count, and those in which torch runs backwards on GPUs: Gloo's have other
    names, and may spin while every rank waits.
    """
    with suppress(FileNotFoundError, ProcessLookupError):  # the process, or the thread, has ended
        states = [_name_and_state(f"/proc/{pid}/task/{thread}/stat") for thread in os.listdir(f"/proc/{pid}/task")]
        own, _ = _name_and_state(f"/proc/{pid}/stat")
        return any(state == "R" and (name == own or name.startswith(AUTOGRAD)) for name, state in states)
    return False


def is_stopped(pid: int) -> bool:
    """True if a signal (SIGSTOP, or that of a terminal) has stopped the process."""
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        return _name_and_state(f"/proc/{pid}/stat")[1] == "T"
    return False


def _name_and_state(file: str) -> tuple[str, str]:
    """Parse `1234 (python) S 1 ...`: the name, which may contain brackets itself, and the letter after it."""
    with open(file) as stat:
        before, _, after = stat.read().rpartition(")")
    return before.partition("(")[2], after.split()[0]
