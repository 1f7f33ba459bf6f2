"""Progress of a run: on a terminal a line that is replaced, elsewhere a plain line now and then.

The line vanishes when the part ends. It is drawn between two examples, not by a thread: ranks are started meanwhile.
"""

from __future__ import annotations

import time

from verification.console import Console
from verification.wording import counted, rate

BAR = 16  # columns
DRAW_EVERY = 0.5  # seconds between drawings of the line
# Seconds until the first plain line of a part. The interval then doubles, up to LINES_APART.
FIRST_LINE, LINES_APART = 5.0, 60.0


class PlainLines:
    """Timer of plain lines, with growing intervals."""

    def __init__(self) -> None:
        self._wait, self._last = FIRST_LINE, time.perf_counter()

    def due(self) -> bool:
        """Return True if a line is due, and start the next interval."""
        now = time.perf_counter()
        if now - self._last < self._wait:
            return False
        self._last, self._wait = now, min(2 * self._wait, LINES_APART)
        return True


class RunProgress:
    """Progress of a run on a console, part by part."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title, self._goal, self._done = "", 0, 0
        self._lines, self._drawn, self._since = PlainLines(), 0.0, 0.0

    def begin(self, title: str, goal: int) -> None:
        """Begin a part of `goal` examples."""
        self._title, self._goal, self._done, self._lines = title, goal, 0, PlainLines()
        self._drawn = self._since = time.perf_counter()
        self._console.progress(f"{title}: {counted(goal, 'example')}")

    def advance(self, worst: float) -> None:
        """Count one more example. worst: the worst error / bound so far."""
        self._done += 1
        now = time.perf_counter()
        done = f"{self._done}/{counted(self._goal, 'example')}, {rate(self._done, now - self._since)}"
        line = f"{self._title}: {done}, worst error / bound {worst:.3f}"
        if not self._console.is_terminal:
            if self._done < self._goal and self._lines.due():
                self._console.print(line)
        elif now - self._drawn >= DRAW_EVERY:
            filled = min(BAR, BAR * self._done // max(1, self._goal))
            self._console.progress(f"[{'#' * filled}{' ' * (BAR - filled)}] {line}")
            self._drawn = now

    def end(self) -> None:
        """End the part, or do nothing."""
        self._console.progress("")
