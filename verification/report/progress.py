"""Progress of a run: a bar for each part on a terminal, elsewhere a plain line now and then.

The bars vanish when the run ends. They are drawn between two examples, not by a thread: ranks are started meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from verification.wording import counted, rate

DRAW_EVERY = 0.5  # seconds between drawings of the bars
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
    """Progress of a run on a console, part by part. Use as a context manager around the parts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: rich.progress.Progress | None = None
        self._title, self._goal, self._done, self._task = "", 0, 0, TaskID(0)
        self._lines, self._drawn, self._since = PlainLines(), 0.0, 0.0

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            speed, worst = TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[worst]}")
            self._bars = rich.progress.Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), speed, worst,
                TimeRemainingColumn(), console=self._console, auto_refresh=False, transient=True,
            )  # fmt: skip
            self._bars.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def begin(self, title: str, goal: int) -> None:
        """Begin a part of `goal` examples."""
        self._title, self._goal, self._done, self._lines = title, goal, 0, PlainLines()
        self._drawn = self._since = time.perf_counter()
        if self._bars is not None:
            self._task = self._bars.add_task(title, total=goal, rate="", worst="")
            self._bars.refresh()

    def advance(self, worst: float) -> None:
        """Count one more example. worst: the worst error / bound so far."""
        self._done += 1
        now = time.perf_counter()
        speed = rate(self._done, now - self._since)
        if self._bars is not None:
            self._bars.update(self._task, completed=self._done, rate=speed, worst=f"worst {worst:.3f}")
            if now - self._drawn >= DRAW_EVERY:
                self._bars.refresh()
                self._drawn = now
        elif self._done < self._goal and self._lines.due():
            done = f"{self._done}/{counted(self._goal, 'example')}"
            self._console.print(
                f"{self._title}: {done}, {speed}, worst error / bound {worst:.3f}", highlight=False, markup=False
            )

    def end(self) -> None:
        """End the part."""
        if self._bars is not None:
            self._bars.stop_task(self._task)
            self._bars.refresh()
