"""Kinds of saved counter-examples, and the reader of each. A field such as "law" or "peer" tells the kind; a plain Case
has none of these fields."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verification.failures import Refused, VerificationFailure
from verification.report.counter_example import counter_example
from verification.report.report import Report
from verification.run.backends import Backend, Unavailable
from verification.search.experiment import Experiment, ToolError


class Saved(Protocol):
    """A saved counter-example, read and validated. world: the number of ranks that it needs."""

    @property
    def world(self) -> int: ...

    def prepare(self, backend: Backend) -> None:
        """Prepare the backend before it starts. Raises Unavailable if the example cannot be replayed on it."""
        return

    def run(self, backend: Backend, report: Report, file: Path) -> None:
        """Check the example on the ranks of the backend, and report the result. file: the saved record."""


OWN_ADAPTERS = "verification.peers.adapters."  # these modules may be named by a file

# Field of the record -> function that reads it, or raises ValueError. Imported on use: some are in folders that import
# this one.
READERS = {
    "peer": "verification.peers.saved_peer:read_peer_example",  # before "law": laws of any attention have both
    "law": "verification.replay.records:read_law",
    "real_size": "verification.replay.records:read_problem",
    "fault": "verification.faults.fault_run:read_fault",
    "training_fault": "verification.faults.training_faults:TRAINING_FAULTS.read",
    "file_fault": "verification.faults.files:FILE_FAULTS.read",
    "training": "verification.training.saved_training:read_training_example",
    "model": "verification.models.saved_model:read_model_example",
    "step_peer": "verification.peers.training.saved_step_peer:read_step_peer_example",
}


@dataclass(frozen=True)
class SavedExample(Saved):
    """A subject of an experiment, and its record."""

    experiment: Experiment
    subject: Any
    record: dict[str, Any]

    @property
    def world(self) -> int:
        return self.experiment.case_of(self.subject).world

    def run(self, backend: Backend, report: Report, file: Path) -> None:
        report.start_world(self.world, 1)
        subject = self.experiment.placed(self.subject, backend.device)
        case, device = self.experiment.case_of(subject), self.experiment.case_of(self.subject).device
        if subject is not self.subject:
            report.say(f"the Case has device {device!r}; on {backend.name} it runs on {case.device!r}")
        started = time.perf_counter()
        try:
            ratios = self.experiment.check(backend, subject)
        except VerificationFailure as failure:
            self.experiment.add_cause(failure, backend, subject, subject)
            title = self.experiment.property_of(subject, failure)
            report.failed(counter_example(failure, title, case.world, self.record, file, backend.name))
        except Unavailable as error:  # such as a peer whose package is not installed; the rest is the ranks' tracebacks
            raise Unavailable(str(error).partition("\n")[0]) from error
        except Exception as error:
            raise ToolError(f"{self.experiment.name} of {file}") from error
        else:
            report.held(case.dtype, ratios, time.perf_counter() - started)
        report.end_world("replay")


def experiment_with(record: Any, field: str, form: str, make: Callable[[str], Experiment]) -> Experiment:
    """Return the Experiment with what a field of the record names. form: of the name. Raises ValueError for one that
    cannot be loaded."""
    name = record[field]
    if not isinstance(name, str):
        raise ValueError(f"{field} is {name!r}; it must be {form}")
    try:
        return make(name)
    except Refused as error:
        raise ValueError(str(error)) from error
