"""Run one saved counter-example again, on the ranks that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verification import real_size, runner
from verification.backends import Backend, GlooBackend, Unavailable
from verification.case import Case
from verification.failures import VerificationFailure
from verification.laws import LAWS
from verification.report import Failure, Report


def replay(file: Path, report: Report, backend: Backend | None = None) -> Report:
    """Raises Unavailable for a file that is none, or holds no Case, law or problem; what is found is in the
    report.
    """
    try:
        record = json.loads(file.read_text())
        experiment, subject, case = _understand(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"argument FILE: cannot read a counter-example from {file}: {error!r}") from error
    world = case.world
    if world > runner.MOST_RANKS:
        raise Unavailable(f"argument FILE: world is {world} in {file}; it must be at most {runner.MOST_RANKS}")
    backend = GlooBackend(runner.PATIENCE) if backend is None else backend
    try:
        backend.start(world)
        with report:
            if experiment is None:
                real_size.run(backend, report, subject, file.parent)
            else:
                report.start_world(world, 1)
                _check(experiment, subject, backend, report, record, file)
                report.end_world("replay")
    finally:
        backend.close()
    report.summary()
    return report


def _check(
    experiment: runner.Experiment, subject: Any, backend: Backend, report: Report, record: dict[str, Any], file: Path
) -> None:
    case = experiment.case_of(subject)
    try:
        hunt = runner.Hunt(experiment, backend, report, case.world)
        hunt.attempt(subject)
    except VerificationFailure as failure:
        name = experiment.property_of(failure)
        report.failed(Failure(failure.kind, name, case.world, record, file, str(failure)))


def _understand(record: Any) -> tuple[runner.Experiment | None, Any, Any]:
    """(experiment, subject, what has a world size): None stands for the problem of real size."""
    if "real_size" in record:
        problem = real_size.Problem(**record["real_size"])
        return None, problem, problem
    if "law" in record:
        laws = {law.name: law for law in LAWS}
        if record["law"] not in laws:
            raise ValueError(f"law is {record['law']!r}; it must be one of {', '.join(laws)}")
        case = Case.from_json(json.dumps(record["case"]))
        return runner.law_experiment(laws[record["law"]]), (case, record["how"]), case
    case = Case.from_json(json.dumps(record))
    return runner.EXAMPLES, case, case
