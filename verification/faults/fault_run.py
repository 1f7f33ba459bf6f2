"""A run of faults on several world sizes over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from verification.faults.fault_experiment import FAULTS
from verification.faults.inject import KINDS
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


def table(report: Report) -> list[str]:
    """One line for each kind of fault: their number, the failure that names them, seconds."""
    lines = [f"{'fault':<24}{'faults':>8}  {'named, with its rank, as':<38}{'seconds':>8}"]
    for kind in KINDS:
        row = report.rows.total(kind.title)
        lines.append(f"{kind.title:<24}{row.examples:>8}  {kind.named_as:<38}{row.seconds:>8.1f}")
    return lines
