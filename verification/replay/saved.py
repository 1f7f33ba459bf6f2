"""Saved: a counter-example that was read from a record, and its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verification.failures import VerificationFailure, WrongResult
from verification.problems import real_size
from verification.record_kinds import KINDS, Record
from verification.report.counter_example import counter_example
from verification.report.report import Report
from verification.run.backends import Backend, Unavailable
from verification.search.experiment import Experiment, ToolError
from verification.wording import counted

UNKNOWN = (
    "it failed when it was found, among other calls on the same ranks, and it may hold now because it needs some of "
    "these, which the record does not have (before is null), or a certain timing; so it is not known to be mended"
)


@dataclass(frozen=True)
class Saved:
    """A counter-example, read and validated.

    case        of the record, read
    experiment  checks it; None: `run` does it all
    run         of its Replayer
    before      examples that run first on the same ranks; None: the failure needed some that are not known
    """

    record: Record
    case: Any
    experiment: Experiment | None
    run: Run | None
    before: tuple[Saved, ...] | None = ()

    @property
    def world(self) -> int:
        """Number of ranks that it needs."""
        return int(self.case.world)

    @property
    def subject(self) -> Any:
        """Subject of the experiment."""
        return (self.case, self.record.how) if KINDS[self.record.kind].how else self.case

    def prepare(self, backend: Backend) -> None:
        """Prepare a backend before it starts. Raises Unavailable if the example cannot be replayed on it."""
        kind = KINDS[self.record.kind]
        if backend.name == "sim" and not kind.simulated:
            raise Unavailable(f"argument --backend: {kind.title} needs processes; write gloo, not sim")
        if self.experiment is not None:
            self.experiment.prepare(backend)


# (counter-example, backend, report, file of the record)
Run = Callable[[Saved, Backend, Report, Path], None]


def run_example(saved: Saved, backend: Backend, report: Report, file: Path) -> None:
    """Check a subject of an experiment, after those before it."""
    assert saved.experiment is not None
    report.start_world(saved.world, 1)
    experiment, subject = saved.experiment, saved.experiment.placed(saved.subject, backend.device)
    case, device = experiment.case_of(subject), saved.case.device
    if subject is not saved.subject:
        report.say(f"the Case has device {device!r}; on {backend.name} it runs on {case.device!r}")
    started = time.perf_counter()
    try:
        for earlier in saved.before or ():
            assert earlier.experiment is not None
            with suppress(WrongResult):
                earlier.experiment.check(backend, earlier.experiment.placed(earlier.subject, backend.device))
        ratios = experiment.check(backend, subject)
    except VerificationFailure as failure:
        if saved.before == ():
            experiment.add_cause(failure, backend, subject, subject)
        elif saved.before:
            failure.add_note(f"cause: earlier calls: {counted(len(saved.before), 'example')} of `before` ran first")
        title = experiment.property_of(subject, failure)
        report.failed(counter_example(failure, title, case.world, saved.record.to_dict(), file, backend.name))
    except Unavailable as error:  # such as a peer whose package is not installed; the rest is the ranks' tracebacks
        raise Unavailable(str(error).partition("\n")[0]) from error
    except Exception as error:
        raise ToolError(f"{experiment.name} of {file}") from error
    else:
        if saved.before is None:
            raise Unavailable(f"{file} did not fail this time: {UNKNOWN}")
        report.held(case.dtype, ratios, time.perf_counter() - started)
    report.end_world("replay")


def run_real_size(saved: Saved, backend: Backend, report: Report, file: Path) -> None:
    real_size.run(backend, report, saved.case, file.parent)


@dataclass(frozen=True)
class Replayer:
    """Functions that replay a kind of record. `experiment` and `validate` also take the names in the record, in order.

    read        the case, from JSON. Raises ValueError
    experiment  checks it, of those names. Raises Refused or ValueError for a wrong one. None: `run` does it all
    validate    raises ValueError for a wrong `how` of the case
    run         checks and reports it; None: only ranks of torchrun can (`verification.cli.validate`)
    """

    read: Callable[[Any], Any]
    experiment: Callable[..., Experiment] | None = None
    validate: Callable[..., None] = lambda case, how, *names: None
    run: Run | None = run_example
