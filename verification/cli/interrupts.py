"""Ctrl-C in a destructor, or a function of the garbage collector, where Python prints KeyboardInterrupt and goes on."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DELAY = 0.05  # seconds, until such a function has ended


@contextmanager
def lost_interrupts_repeated() -> Iterator[None]:
    """Send the main thread another SIGINT for each KeyboardInterrupt that cannot be raised where it comes."""
    before = sys.unraisablehook

    def repeat(lost: Any) -> None:
        if lost.exc_type is KeyboardInterrupt and (main := threading.main_thread().ident) is not None:
            threading.Timer(DELAY, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(lost)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before
