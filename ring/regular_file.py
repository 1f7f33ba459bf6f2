"""Contents of a file that a user names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_BYTES = 2**20  # runs save some kilobytes


def read_regular(file: Path) -> bytes:
    """Return the contents of a file of at most MAX_BYTES. Raises OSError for one that cannot be opened, ValueError for
    a longer one, and for a FIFO or a device, from which reading might never end."""
    with open(file, "rb", opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("it is no regular file")
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes; at most that many are read")
    return content


def _without_waiting(name: str, flags: int) -> int:
    """Open a file; a FIFO without waiting for its writer, a terminal without becoming its process."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
