"""The descendants of a process, read from /proc (Linux only)."""

from __future__ import annotations

import os
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
