"""A run of faults: so many on each world size, in ranks over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from verification.faults.fault import KINDS
from verification.faults.fault_experiment import FAULTS
from verification.faults.struck import observe_struck
from verification.report.report import Report
from verification.run.backends import PRELOAD, GlooBackend
from verification.runner import save
from verification.search.search import Search

FAULT_WORLDS = (2, 3, 4)
COUNT = 200
BUDGET = 30.0  # seconds to shrink a fault that was mishandled, and to look for others


def run_faults(report: Report, worlds: Sequence[int], count: int, seed: int, failures: Path) -> None:
    """`count` faults in all. What is mishandled is shrunk, saved in the folder `failures`, and in the report.

    Raises Unavailable where ranks do not start.
    """
    for number, world in enumerate(worlds):
        share = count // len(worlds) + (number < count % len(worlds))
        if share:
            run_faults_on(report, world, share, seed, failures)


def run_faults_on(report: Report, world: int, count: int, seed: int, failures: Path) -> None:
    """The same on one world size, with ranks that are ended afterwards."""
    with closing(GlooBackend(preload=(*PRELOAD, observe_struck.__module__))) as backend:
        backend.start(world)
        report.start_world(world, count, "faults")
        search = Search(FAULTS, backend, report, world, BUDGET)
        for found in search.explore(count, seed):
            report.failed(save(found, search, failures))
        report.end_world("faults")


def table(report: Report) -> list[str]:
    """A line for each kind of fault: how many, what they are named as, seconds."""
    lines = [f"{'fault':<24}{'faults':>8}  {'named, with its rank, as':<38}{'seconds':>8}"]
    for kind in KINDS:
        row = report.rows.of(kind.title)
        lines.append(f"{kind.title:<24}{row.examples:>8}  {kind.named_as:<38}{row.seconds:>8.1f}")
    return lines
