"""The end of a process with its parent (Linux only)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends. Kept over an exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
