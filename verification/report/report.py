"""Report: output of a run, during it (`progress`) and at its end (`summary`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verification.console import Console
from verification.failures import RankFailure, VerificationFailure
from verification.protocols import CaseLike
from verification.report import summary
from verification.report.counter_example import CounterExample
from verification.report.progress import RunProgress
from verification.report.run_record import RunRecord
from verification.report.text import paragraph
from verification.wording import counted, rate


class Report(RunRecord):
    """Collects results and prints them.

    extras: further fields of the JSON. verbose: print a row per property and world size, the full coverage, and each
    counter-example.
    """

    def __init__(self, console: Console, extras: Mapping[str, Any] | None = None, verbose: bool = False) -> None:
        super().__init__(extras=dict(extras or {}))
        self.console, self.verbose, self.progress = console, verbose, RunProgress(console)
        self._running = False  # between `start_world` and `end_world`
        self._world = self._done = self._repeated = self._failed_before = 0
        self._worst = self._since = 0.0

    def start_world(self, world: int, goal: int, what: str = "") -> None:
        """Begin a part of `goal` examples on that world size. what: its name in the progress."""
        self._running, self._world, self._done, self._repeated = True, world, 0, 0
        self._failed_before, self._worst, self._since = len(self.failures), 0.0, time.perf_counter()
        self.progress.begin(f"world {world}, {what}" if what else f"world {world}", goal)

    def end_world(self, what: str = "examples") -> None:
        """Print a line about the part that `start_world` began."""
        seconds = time.perf_counter() - self._since
        self.seconds += seconds
        self._running = False
        self.progress.end()
        fresh = self.failures[self._failed_before :]
        fewest = min((failure.world for failure in fresh), default=self._world)
        found = f", {counted(len(fresh), 'counter-example')}" if fresh else ""
        found += f", shrunk to {counted(fewest, 'rank')}" if fewest < self._world else ""
        found += f" ({counted(self._repeated, 'further draw')} failed in the same way)" if self._repeated else ""
        speed = f", {rate(self._done, seconds)}" if self._done > 1 else ""
        done = f"{counted(self._done, 'example')} held" if self._done or not fresh else "no example held"
        done += f", {len(fresh) + self._repeated} failed," if fresh or self._repeated else ""
        self.note(f"world {self._world}, {what}: {done} in {seconds:.1f} s{speed}{found}")

    def interrupt(self) -> None:
        """Mark the run as interrupted, and end the part that is running."""
        self.interrupted = True
        if self._running:
            self.end_world("interrupted")

    def not_run(self, worlds: Sequence[int], reason: BaseException | str) -> None:
        """Print which world sizes are left out, if any, and why."""
        why = "the run was interrupted" if isinstance(reason, KeyboardInterrupt) else str(reason).partition("\n")[0]
        if worlds:
            self.say(f"{'worlds' if len(worlds) > 1 else 'world'} {', '.join(map(str, worlds))}: not run: {why}")

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        """Count an example that held. ratios: worst error / bound by property (0 for an exact check)."""
        self.rows.add(self._world, dtype, ratios, seconds)
        self.examples += 1
        self.distributed += self._world > 1
        self._done += 1
        self._worst = float(np.max([self._worst, *ratios.values()]))  # np.max keeps a NaN
        if self._running:
            self.progress.advance(self._worst)

    def covered(self, case: CaseLike) -> None:
        """Count a plain Case that held in the coverage."""
        self.coverage.add(case)

    def failed(self, failure: CounterExample) -> None:
        """Record a counter-example, and print it in full: the summary shortens stacks."""
        self.failures.append(failure)
        for line in summary.describe(failure):
            self.console.print(line)

    def met(self, failure: VerificationFailure) -> None:
        """Announce a new failure of a rank at once: shrinking may take long."""
        if isinstance(failure, RankFailure):
            self.say(f"{failure.kind}: {failure.headline}; now to be shrunk")

    def failed_again(self) -> None:
        """Count an example that failed like a reported one."""
        self._repeated += 1

    def say(self, line: str) -> None:
        """Print a line."""
        for part in paragraph(line, hanging="  "):
            self.console.print(part)

    def note(self, line: str) -> None:
        """Print a line of progress; on a terminal the line of progress has shown it."""
        if self.verbose or not self.console.is_terminal:
            self.say(line)

    def detail(self, line: str) -> None:
        """Print a line if verbose."""
        if self.verbose:
            self.say(line)

    def summary(self, replayed: bool = False) -> None:
        """Print the table, the coverage, the verdict and the counter-examples; after a replay the example in full."""
        for line in summary.summarize_replay(self) if replayed else summary.summarize_run(self, self.verbose):
            self.console.print(line)
