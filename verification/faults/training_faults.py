"""Faults of a training, of its checkpoints in one process and of its processes, that a kind and a seed describe: their
drawing and their run."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from verification.faults import checkpoint_faults, training_process
from verification.faults.fault_experiment import MishandledFault
from verification.record_kinds import Record
from verification.report.counter_example import save_record
from verification.report.report import Report
from verification.saved_fields import SavedFields, choice, integer

DTYPE = "float64"  # for the report's rows: these faults have no dtype of their own
EVERY = 32  # one fault in so many is of processes, and takes seconds
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class TrainingFault:
    """A kind of fault. strike: injects it in an empty folder, and raises MishandledFault with a verdict."""

    title: str
    must: str
    strike: Callable[[random.Random, Path], None]


IN_FILES = {
    **{name: TrainingFault(title, "named with its file", checkpoint_faults.damaged_by(name))
       for name, title in checkpoint_faults.DAMAGE.items()},
    "foreign": TrainingFault("a checkpoint of others", "refused by a name", checkpoint_faults.foreign),
    "full": TrainingFault("a full disk", "named, nothing left", checkpoint_faults.full_disk),
    "killed": TrainingFault("a kill within a saving", "one checkpoint whole", checkpoint_faults.killed),
    "held": TrainingFault("a folder that is held", "its holder named", checkpoint_faults.held),
    "taken": TrainingFault("a saving over another", "refused, that stays whole", checkpoint_faults.taken),
}  # fmt: skip
IN_PROCESSES = {
    name: TrainingFault(title, "nothing lost or left behind", training_process.striking(name))
    for name, title in training_process.STRIKES.items()
}
KINDS = IN_FILES | IN_PROCESSES


@dataclass(frozen=True)
class DrawnFault(SavedFields):
    """A fault of a run. seed: of what its kind leaves open. It starts processes of its own."""

    world: ClassVar[int] = 1

    kind: str = field(metadata=choice(*KINDS))
    seed: int = field(metadata=integer(0, MAX_SEED))


def drawn(seed: int, count: int) -> Iterator[DrawnFault]:
    """Yield the faults of a run: rounds of every kind in an order of their own, each with a seed of its own."""
    seeds, left = random.Random(seed), {True: list[str](), False: list[str]()}
    for number in range(count):
        slow = number % EVERY == 0
        kinds = list(IN_PROCESSES if slow else IN_FILES)
        left[slow] = left[slow] or seeds.sample(kinds, len(kinds))
        yield DrawnFault(left[slow].pop(), seeds.getrandbits(32))


def run_faults(report: Report, count: int, seed: int, failures: Path) -> None:
    """Inject `count` faults, save mishandled ones in the folder `failures`, and report the first of each kind.
    Raises Unavailable if a program that they strike cannot be started."""
    report.start_world(1, count, "faults of trainings")
    failed = set[str]()
    for fault in drawn(seed, count):
        failure = struck(report, fault)
        if failure is None:
            continue
        if fault.kind in failed:
            report.failed_again()
            continue
        failed.add(fault.kind)
        record = Record("training fault", fault.to_dict()).to_dict()
        report.failed(save_record(failure, KINDS[fault.kind].title, 1, record, failures, "gloo"))
    report.end_world("faults of trainings")


def struck(report: Report, fault: DrawnFault) -> MishandledFault | None:
    """Inject a fault. Returns the failure, or counts one that was handled."""
    kind, started = KINDS[fault.kind], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ring-fault-") as folder:
        try:
            kind.strike(random.Random(fault.seed), Path(folder))
        except MishandledFault as failure:
            return failure
    report.held(DTYPE, {kind.title: 0.0}, time.perf_counter() - started)
    return None
