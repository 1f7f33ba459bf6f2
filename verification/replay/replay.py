"""Run one saved counter-example again, on any backend."""

from __future__ import annotations

import json
from pathlib import Path

from verification import runner
from verification.replay.records import understand
from verification.report.report import Report
from verification.run.backends import Backend, Unavailable


def replay(file: Path, report: Report, backend: Backend, argument: str = "FILE") -> Report:
    """Raises Unavailable for a file that is none, or holds no Case, law or problem; what is found is in the
    report. Closes the backend. argument: by which the file was given.
    """
    try:
        saved = understand(json.loads(file.read_text()))
    except (OSError, ValueError, RecursionError) as error:  # lists within lists are too much for the parser
        raise Unavailable(f"argument {argument}: cannot read a counter-example from {file}: {error}") from error
    saved.prepare(backend)
    most = runner.MOST_RANKS[backend.name]
    if saved.world > most:
        raise Unavailable(
            f"argument {argument}: world is {saved.world} in {file}; on {backend.name} it must be at most {most}"
        )
    try:
        backend.start(saved.world)
        with report:
            saved.run(backend, report, file)
    finally:
        backend.close()
    report.summary(replayed=True)
    return report
