"""The processes that descend from one; read from /proc, so on Linux only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Its children, their children and so on, those that have ended and were not waited for among them."""
    found: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # the process, or a thread of it, has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found |= {int(child)} | descendants(int(child))
    return found
