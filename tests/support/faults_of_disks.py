"""Faults of a disk, in this process or in a fork of it: a full one, and one that loses its power."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")  # of a saving, besides os.fsync


@contextmanager
def file_limit(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def steps_until_lost(folder: Path, action: Callable[[], object], last: int = 0) -> int:
    """Take an action on a folder in a forked process, which loses its power before step `last`, and return the number
    of the steps that it began. New files without an fsync lose their contents, new folders their names."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    begun, busy, fsync = 0, False, os.fsync
    synced = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}

    def step(event: str, arguments: Any) -> None:
        nonlocal begun, busy
        if busy or event not in _STEPS or not str(arguments[0]).startswith(str(folder)):
            return
        begun, busy = begun + 1, True
        if begun == last:
            for path in sorted(folder.rglob("*"), reverse=True):
                if path.parent.stat().st_ino not in synced and path.is_file():
                    path.unlink()
                elif path.stat().st_ino not in synced and path.is_file():
                    os.truncate(path, 0)
            os._exit(begun)
        busy = False

    def sync(fd: Any) -> None:
        step("open", (folder,))
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    try:
        torch.set_num_threads(1)  # threads of the parent's pool do not exist here
        os.fsync = sync
        sys.addaudithook(step)
        action()
    finally:
        os._exit(begun)
