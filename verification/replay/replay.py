"""Run one saved counter-example again, on any backend."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from verification import runner
from verification.failures import VerificationFailure
from verification.peers.peer import Refused
from verification.peers.peer_rank import prepare
from verification.problems import real_size
from verification.replay import records
from verification.report.counter_example import counter_example
from verification.report.report import Report
from verification.run.backends import Backend, Unavailable
from verification.search.experiment import Experiment, ToolError


def replay(file: Path, report: Report, backend: Backend, argument: str = "FILE") -> Report:
    """Raises Unavailable for a file that is none, or holds no Case, law or problem; what is found is in the
    report. Closes the backend. argument: by which the file was given.
    """
    try:
        record = json.loads(file.read_text())
        experiment, subject, case = records.understand(record)
    except (OSError, ValueError, RecursionError, Refused) as error:  # lists within lists are too much for the parser
        raise Unavailable(f"argument {argument}: cannot read a counter-example from {file}: {error}") from error
    if "peer" in record:
        if backend.name != "gloo":
            raise Unavailable(f"argument --backend: a peer needs torch.distributed, on gloo; got {backend.name}")
        backend.prepare = partial(prepare, record["peer"])
    world = case.world
    most = runner.MOST_RANKS[backend.name]
    if world > most:
        raise Unavailable(
            f"argument {argument}: world is {world} in {file}; on {backend.name} it must be at most {most}"
        )
    try:
        backend.start(world)
        with report:
            if experiment is None:
                real_size.run(backend, report, subject, file.parent)
            else:
                report.start_world(world, 1)
                here = experiment.placed(subject, backend.name)
                if here is not subject:
                    report.say(f"the Case has device {case.device!r}; on {backend.name} it runs on "
                               f"{experiment.case_of(here).device!r}")  # fmt: skip
                _check(experiment, here, backend, report, record, file)
                report.end_world("replay")
    finally:
        backend.close()
    report.summary(replayed=True)
    return report


def _check(
    experiment: Experiment, subject: Any, backend: Backend, report: Report, record: dict[str, Any], file: Path
) -> None:
    case = experiment.case_of(subject)
    started = time.perf_counter()
    try:
        ratios = experiment.check(backend, subject)
    except VerificationFailure as failure:
        name = experiment.property_of(subject, failure)
        report.failed(counter_example(failure, name, case.world, record, file, backend.name))
    except Exception as error:
        raise ToolError(f"{experiment.name} of {file}") from error
    else:
        report.held(case.dtype, ratios, time.perf_counter() - started)
