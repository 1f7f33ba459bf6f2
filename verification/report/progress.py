"""What a run shows while it goes: on a terminal a bar for each part of it, elsewhere a plain line now and then.

The bars vanish when the run ends. They are drawn between two examples, never by a thread of their own, since ranks are
started while they are shown.
"""

from __future__ import annotations

import time
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

from verification.wording import counted

DRAW_EVERY = 0.5  # seconds between drawings of the bars
# Seconds until the first plain line of a part; each further one is twice as late, until they are so far apart.
FIRST_LINE, LINES_APART = 5.0, 60.0


def bars(console: Console, *more: ProgressColumn) -> rich.progress.Progress:
    """What is done, of how much, and how long the rest takes, in a line of 80 columns. Drawn by `refresh` alone."""
    return rich.progress.Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), *more, TimeRemainingColumn(),
        console=console, auto_refresh=False, transient=True,
    )  # fmt: skip


class PlainLines:
    """Says when the next line is due where the output is not a terminal."""

    def __init__(self) -> None:
        self._wait, self._last = FIRST_LINE, time.perf_counter()

    def due(self) -> bool:
        """Whether a line is due now; it is then taken to be printed."""
        now = time.perf_counter()
        if now - self._last < self._wait:
            return False
        self._last, self._wait = now, min(2 * self._wait, LINES_APART)
        return True


class RunProgress:
    """What is shown on a console. Several parts may be under way at a time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars: rich.progress.Progress | None = None

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self.bars = bars(self.console, TextColumn("{task.fields[rate]}/s"), TextColumn("{task.fields[worst]}"))
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None

    def begin(self, title: str, goal: int) -> RunPart:
        return RunPart(self, title, goal)


class RunPart:
    """A part of the run with a number of examples: a bar, or lines."""

    def __init__(self, shown: RunProgress, title: str, goal: int) -> None:
        self._shown, self._title, self._goal, self._done = shown, title, goal, 0
        self._lines, self._task = PlainLines(), TaskID(0)
        self._drawn = self._since = time.perf_counter()
        if shown.bars is not None:
            self._task = shown.bars.add_task(title, total=goal, rate="0", worst="")
            shown.bars.refresh()

    def advance(self, worst: float) -> None:
        self._done += 1
        now, bars_shown = time.perf_counter(), self._shown.bars
        rate = f"{self._done / max(1e-9, now - self._since):.0f}"
        if bars_shown is not None:
            bars_shown.update(self._task, completed=self._done, rate=rate, worst=f"worst {worst:.3f}")
            if now - self._drawn >= DRAW_EVERY:
                bars_shown.refresh()
                self._drawn = now
        elif self._done < self._goal and self._lines.due():
            done = f"{self._done}/{counted(self._goal, 'example')}"
            self._shown.console.print(
                f"{self._title}: {done}, {rate}/s, worst error / bound {worst:.3f}", highlight=False, markup=False
            )

    def end(self) -> None:
        if self._shown.bars is not None:
            self._shown.bars.stop_task(self._task)
            self._shown.bars.refresh()
