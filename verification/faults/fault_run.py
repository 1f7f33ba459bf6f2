"""A run of faults on several world sizes over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from verification.faults.fault_experiment import FAULTS
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.runner import save
from verification.search.search import Search

FAULT_WORLDS = (2, 3, 4)
COUNT = 200
BUDGET = 30.0  # seconds to shrink a mishandled fault, and to look for others


def run_faults(report: Report, worlds: Sequence[int], count: int, seed: int, failures: Path) -> None:
    """Inject `count` faults in all. Shrink mishandled ones, save them in the folder `failures`, and report them.
    Raises Unavailable if ranks do not start."""
    for number, world in enumerate(worlds[:count]):
        share = count // len(worlds) + (number < count % len(worlds))
        with closing(GlooBackend()) as backend:
            FAULTS.prepare(backend)
            backend.start(world)
            report.start_world(world, share, "faults")
            search = Search(FAULTS, backend, report, world, BUDGET)
            for failure in search.explore(share, seed):
                report.failed(save(failure, search, failures))
            report.end_world("faults")
