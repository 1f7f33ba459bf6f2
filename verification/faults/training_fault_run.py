"""A run of faults of trainings, and the reader of saved ones: {"training_fault": {"kind": ..., "seed": ...}}."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference import validators
from verification.faults.fault_experiment import MishandledFault
from verification.faults.training_faults import KINDS, drawn, validate
from verification.replay.registry import Saved
from verification.report.counter_example import counter_example, save_record
from verification.report.report import Report
from verification.run.backends import Backend

DTYPE = "float64"  # of all checkpoints here, for the report's rows


def run_training_faults(report: Report, count: int, seed: int, failures: Path) -> None:
    """Inject `count` faults, save mishandled ones in the folder `failures`, and report the first of each kind.
    Raises Unavailable if the training cannot be started."""
    report.start_world(1, count, "faults of trainings")
    failed = set[str]()
    for fault in drawn(seed, count):
        failure = struck(report, fault)
        if failure is None:
            continue
        if fault["kind"] in failed:
            report.failed_again()
            continue
        failed.add(fault["kind"])
        record = {"training_fault": fault}
        report.failed(save_record(failure, KINDS[fault["kind"]].title, 1, record, failures, "gloo"))
    report.end_world("faults of trainings")


def struck(report: Report, fault: dict[str, Any]) -> MishandledFault | None:
    """Inject a fault. Returns the failure, or counts one that was handled."""
    kind, started = KINDS[fault["kind"]], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ring-fault-") as folder:
        try:
            kind.strike(random.Random(fault["seed"]), Path(folder))
        except MishandledFault as failure:
            return failure
    report.held(DTYPE, {kind.title: 0.0}, time.perf_counter() - started)
    return None


def training_table(report: Report) -> list[str]:
    """One line for each kind of fault: their number, what must come of them, seconds."""
    lines = [f"{'fault of a training':<28}{'faults':>8}  {'must be':<34}{'seconds':>8}"]
    for kind in KINDS.values():
        row = report.rows.total(kind.title)
        lines.append(f"{kind.title:<28}{row.examples:>8}  {kind.must:<34}{row.seconds:>8.1f}")
    return lines


@dataclass(frozen=True)
class SavedTrainingFault(Saved):
    """A mishandled fault of a training, which starts processes of its own."""

    fault: dict[str, Any]
    world = 1

    def run(self, backend: Backend, report: Report, file: Path) -> None:
        report.start_world(1, 1)
        failure = struck(report, self.fault)
        if failure is not None:
            title, record = KINDS[self.fault["kind"]].title, {"training_fault": self.fault}
            report.failed(counter_example(failure, title, 1, record, file, backend.name))
        report.end_world("replay")


def read_training_fault(record: dict[str, Any]) -> Saved:
    """Read a saved fault of a training. Raises ValueError for a malformed record."""
    validators.exactly("a mishandled fault of a training", record, ["training_fault"])
    return SavedTrainingFault(validate(record["training_fault"]))
