"""Report: what a run tells of itself while it goes (`progress`) and when it ends (`summary`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from verification.failures import RankFailure, VerificationFailure
from verification.protocols import Example
from verification.report import summary
from verification.report.counter_example import CounterExample
from verification.report.progress import RunProgress
from verification.report.run_result import RunRecord
from verification.report.text import paragraph
from verification.wording import counted


class Report(RunRecord):
    """Collects what holds and what fails, and shows it. Use as a context manager around the examples.

    extras: further fields of the JSON. verbose: print every detail: a row for each property and world size, all of the
    coverage, each counter-example.
    """

    def __init__(self, console: Console, extras: Mapping[str, Any] | None = None, verbose: bool = False) -> None:
        super().__init__(extras=dict(extras or {}))
        self.console, self.verbose, self.progress = console, verbose, RunProgress(console)
        self._under_way = False  # between `start_world` and `end_world`
        self._world = self._done = self._alike = self._failed_before = 0
        self._worst = self._since = 0.0

    def __enter__(self) -> Report:
        self.progress.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.progress.__exit__(*exc)

    def start_world(self, world: int, goal: int, what: str = "") -> None:
        """From now on examples are on that world size; `goal` of them are planned. what: for the progress, in words."""
        self._under_way, self._world, self._done, self._alike = True, world, 0, 0
        self._failed_before, self._worst, self._since = len(self.failures), 0.0, time.perf_counter()
        self.progress.begin(f"world {world}, {what}" if what else f"world {world}", goal)

    def end_world(self, what: str = "examples") -> None:
        """Sum up since `start_world`."""
        spent = time.perf_counter() - self._since
        self.seconds += spent
        self._under_way = False
        self.progress.end()
        fresh = len(self.failures) - self._failed_before
        found = f", {counted(fresh, 'counter-example')}" if fresh else ""
        found += f" ({counted(self._alike, 'more example')} failed in the same way)" if self._alike else ""
        rate = f", {self._done / spent:.0f}/s" if self._done > 1 else ""
        done = f"{counted(self._done, 'example')} held" if self._done or not fresh else "no example held"
        self.note(f"world {self._world}, {what}: {done} in {spent:.1f} s{rate}{found}")

    def interrupt(self) -> None:
        """The run ends here, before its time: sum up what was under way."""
        self.interrupted = True
        if self._under_way:
            self.end_world("interrupted")

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        """An example held: by property, its worst error as a fraction of the bound (0 for an exact check)."""
        self.rows.add(self._world, dtype, ratios, seconds)
        self.examples += 1
        self.distributed += self._world > 1
        self._done += 1
        self._worst = float(np.max([self._worst, *ratios.values()]))  # np.max keeps a NaN
        if self._under_way:
            self.progress.advance(self._worst)

    def covered(self, case: Example) -> None:
        """A plain Case held: it counts in the coverage."""
        self.coverage.add(case)

    def failed(self, failure: CounterExample) -> None:
        """Keep a counter-example, and print it at once: of stacks the summary has the first lines only."""
        self.failures.append(failure)
        for line in summary.seen(failure):
            self.console.print(line, soft_wrap=True)

    def met(self, failure: VerificationFailure) -> None:
        """An example failed as none did before. Which rank is at fault is said at once: to shrink it may take long."""
        if isinstance(failure, RankFailure):
            self.say(f"{failure.kind}: {failure.headline}; now to be shrunk")

    def failed_again(self) -> None:
        """An example failed as one did that was reported: it is counted, and passed over."""
        self._alike += 1

    def say(self, line: str) -> None:
        """Print what everybody is to read."""
        for part in paragraph(line, hanging="  "):
            self.console.print(part, markup=False, highlight=False, soft_wrap=True)

    def note(self, line: str) -> None:
        """Say how far the run has come: on a terminal the bars show it."""
        if self.verbose or not self.console.is_terminal:
            self.say(line)

    def detail(self, line: str) -> None:
        """Say what few want to know."""
        if self.verbose:
            self.say(line)

    def summary(self, replayed: bool = False) -> None:
        """Print the table, what the Cases covered, the verdict, the counter-examples. replayed: of one that was run
        again, of which all is told."""
        for line in summary.of_replay(self) if replayed else summary.of_run(self, self.verbose):
            self.console.print(line, soft_wrap=True)
