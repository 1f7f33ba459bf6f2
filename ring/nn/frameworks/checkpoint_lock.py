"""A lock on the folder of a training's checkpoints, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from ring.nn.frameworks.checkpoint_ranks import everywhere, rank

NAME = ".lock"


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the folder until the end of the block, so that no other training saves there. Call it on every rank.

    Removes what savings left there that a kill cut short.

    Args:
        folder: that has, or will have, the folders of the checkpoints; made if it is missing.

    Raises:
        OSError: another process holds it, named with its host, number and time; or it cannot be written.
    """
    locks: list[TextIO] = []
    try:
        everywhere(lambda: locks.append(_take(Path(folder))) if rank() == 0 else None)
        yield
    finally:
        for lock in locks:
            lock.truncate(0)
            lock.close()


def _take(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / NAME).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = _holder(lock.read())
        lock.close()
        raise OSError(f"{folder} is held by {holder}: wait for its end, or name another folder") from None
    lock.truncate(0)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    lock.write(json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since}))
    lock.flush()
    for left in folder.glob(".*.new"):
        shutil.rmtree(left)
    return lock


def _holder(text: str) -> str:
    try:
        held = json.loads(text)
        return f"process {held['process']} of {held['host']} since {held['since']}"
    except (ValueError, KeyError, TypeError):  # it was taken a moment ago
        return "another process"
