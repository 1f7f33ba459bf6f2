"""Faults that a kind and a seed describe: their drawing, their run, and the reading of saved ones."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference import validators
from verification.faults.fault_experiment import MishandledFault
from verification.replay.registry import Saved
from verification.report.counter_example import counter_example, save_record
from verification.report.report import Report
from verification.run.backends import Backend

DTYPE = "float64"  # for the report's rows: these faults have no dtype of their own
MAX_SEED = 2**32 - 1
Strike = Callable[[random.Random, Path], None]


@dataclass(frozen=True)
class SeededFault:
    """A kind of fault. strike: injects it in an empty folder, and raises MishandledFault with a verdict."""

    title: str
    must: str
    strike: Strike


@dataclass(frozen=True)
class SeededFaults:
    """Kinds of faults of one subject.

    field   of a saved record, which is {field: {"kind": ..., "seed": ...}}
    what    the subject in words
    quick   kinds that take milliseconds, in turn
    slow    kinds that take seconds: one fault in `every`
    """

    field: str
    what: str
    quick: Mapping[str, SeededFault]
    slow: Mapping[str, SeededFault]
    every: int

    @property
    def kinds(self) -> dict[str, SeededFault]:
        return {**self.quick, **self.slow}

    def drawn(self, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield the faults of a run: rounds of every kind in an order of their own, each with a seed of its own."""
        seeds, left = random.Random(seed), {True: list[str](), False: list[str]()}
        for number in range(count):
            slow = number % self.every == 0
            kinds = list(self.slow if slow else self.quick)
            left[slow] = left[slow] or seeds.sample(kinds, len(kinds))
            yield {"kind": left[slow].pop(), "seed": seeds.getrandbits(32)}

    def run(self, report: Report, count: int, seed: int, failures: Path) -> None:
        """Inject `count` faults, save mishandled ones in the folder `failures`, and report the first of each kind.
        Raises Unavailable if a program that they strike cannot be started."""
        report.start_world(1, count, f"faults of {self.what}s")
        failed = set[str]()
        for fault in self.drawn(seed, count):
            failure = self.struck(report, fault)
            if failure is None:
                continue
            if fault["kind"] in failed:
                report.failed_again()
                continue
            failed.add(fault["kind"])
            title = self.kinds[fault["kind"]].title
            report.failed(save_record(failure, title, 1, {self.field: fault}, failures, "gloo"))
        report.end_world(f"faults of {self.what}s")

    def struck(self, report: Report, fault: dict[str, Any]) -> MishandledFault | None:
        """Inject a fault. Returns the failure, or counts one that was handled."""
        kind, started = self.kinds[fault["kind"]], time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="ring-fault-") as folder:
            try:
                kind.strike(random.Random(fault["seed"]), Path(folder))
            except MishandledFault as failure:
                return failure
        report.held(DTYPE, {kind.title: 0.0}, time.perf_counter() - started)
        return None

    def table(self, report: Report) -> list[str]:
        """One line for each kind of fault: their number, what must come of them, seconds."""
        lines = [f"{f'fault of a {self.what}':<28}{'faults':>8}  {'must be':<34}{'seconds':>8}"]
        for kind in self.kinds.values():
            row = report.rows.total(kind.title)
            lines.append(f"{kind.title:<28}{row.examples:>8}  {kind.must:<34}{row.seconds:>8.1f}")
        return lines

    def read(self, record: dict[str, Any]) -> Saved:
        """Read a saved fault. Raises ValueError for a malformed record."""
        validators.exactly(f"a mishandled fault of a {self.what}", record, [self.field])
        fault = validators.exactly(self.field, record[self.field], ["kind", "seed"])
        validators.choice("kind", fault["kind"], self.kinds)
        validators.integer("seed", fault["seed"], 0, MAX_SEED)
        return SavedSeededFault(self, fault)


@dataclass(frozen=True)
class SavedSeededFault(Saved):
    """A mishandled fault, which starts processes of its own."""

    faults: SeededFaults
    fault: dict[str, Any]
    world = 1

    def run(self, backend: Backend, report: Report, file: Path) -> None:
        report.start_world(1, 1)
        failure = self.faults.struck(report, self.fault)
        if failure is not None:
            title, record = self.faults.kinds[self.fault["kind"]].title, {self.faults.field: self.fault}
            report.failed(counter_example(failure, title, 1, record, file, backend.name))
        report.end_world("replay")
