"""Kinds of saved counter-examples, and the reader of each. A field such as "law" or "peer" tells the kind; a plain Case
has none of these fields."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verification.failures import Refused, VerificationFailure, WrongResult
from verification.report.counter_example import counter_example
from verification.report.report import Report
from verification.run.backends import Backend, Unavailable
from verification.search.experiment import Experiment, ToolError
from verification.wording import counted


class Saved(Protocol):
    """A saved counter-example, read and validated. world: the number of ranks that it needs."""

    @property
    def world(self) -> int: ...

    def prepare(self, backend: Backend) -> None:
        """Prepare the backend before it starts. Raises Unavailable if the example cannot be replayed on it."""
        return

    def run(self, backend: Backend, report: Report, file: Path) -> None:
        """Check the example on the ranks of the backend, and report the result. file: the saved record."""


UNKNOWN = (
    "it failed when it was found, among other calls on the same ranks, and it may hold now because it needs some of "
    "these, which the record does not have (before is null), or a certain timing; so it is not known to be mended"
)
OWN_ADAPTERS = "verification.peers.adapters."  # these modules may be named by a file

# Field of the record -> function that reads it, or raises ValueError. Imported on use: some are in folders that import
# this one.
READERS = {
    "peer": "verification.peers.saved_peer:read_peer_example",  # before "law": laws of any attention have both
    "law": "verification.replay.records:read_law",
    "real_size": "verification.replay.records:read_problem",
    "fault": "verification.faults.fault_run:read_fault",
    "training_fault": "verification.faults.training_faults:read_fault",
    "training": "verification.training.saved_training:read_training_example",
    "model": "verification.models.saved_model:read_model_example",
    "step_peer": "verification.peers.training.saved_step_peer:read_step_peer_example",
}


@dataclass(frozen=True)
class SavedExample(Saved):
    """A subject of an experiment, and its record. before: examples that run first on the same ranks; None: the failure
    needed some that are not known."""

    experiment: Experiment
    subject: Any
    record: dict[str, Any]
    before: tuple[SavedExample, ...] | None = ()

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
            for earlier in self.before or ():
                with suppress(WrongResult):
                    earlier.experiment.check(backend, earlier.experiment.placed(earlier.subject, backend.device))
            ratios = self.experiment.check(backend, subject)
        except VerificationFailure as failure:
            if self.before == ():
                self.experiment.add_cause(failure, backend, subject, subject)
            elif self.before:
                failure.add_note(f"cause: earlier calls: {counted(len(self.before), 'example')} of `before` ran first")
            title = self.experiment.property_of(subject, failure)
            report.failed(counter_example(failure, title, case.world, self.record, file, backend.name))
        except Unavailable as error:  # such as a peer whose package is not installed; the rest is the ranks' tracebacks
            raise Unavailable(str(error).partition("\n")[0]) from error
        except Exception as error:
            raise ToolError(f"{self.experiment.name} of {file}") from error
        else:
            if self.before is None:
                raise Unavailable(f"{file} did not fail this time: {UNKNOWN}")
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
