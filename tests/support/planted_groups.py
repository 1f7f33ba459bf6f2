"""What groups leave behind, planted in every rank before its first task."""

from __future__ import annotations

import os
import threading
from typing import Any

from ring.comm import host_memory
from ring.comm.host_memory import HostMemory


def keeps_a_file_open() -> None:
    real = HostMemory.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        os.dup(self._file.fileno())

    HostMemory.__init__ = init  # type: ignore[method-assign, assignment]


def leaves_a_name() -> None:
    """The file of the page stays in its folder."""
    host_memory.os = _WithoutUnlink()  # type: ignore[assignment]


class _WithoutUnlink:
    def unlink(self, name: str) -> None:
        _left.append(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


_left: list[str] = []


def take_away() -> None:
    """Task: what `leaves_a_name` left."""
    while _left:
        os.unlink(_left.pop())


def begins_a_thread() -> None:
    real = HostMemory.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        threading.Thread(target=threading.Event().wait, daemon=True, name="idle").start()

    HostMemory.__init__ = init  # type: ignore[method-assign, assignment]


def keeps_the_page() -> None:
    real, kept = HostMemory.__init__, []

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        kept.append(self._page)

    HostMemory.__init__ = init  # type: ignore[method-assign, assignment]


def keeps_groups() -> None:
    from ring.comm import process_group

    process_group._facts = {}  # type: ignore[assignment]
