"""The main job: for each world size examples, then laws; at the end one problem of real size."""

from __future__ import annotations

import time

from verification import side_by_side
from verification.report.report import Report
from verification.run.backends import Backend, SimBackend, open_backend
from verification.runner import RunPlan, run_real_size, run_world


def run(plan: RunPlan, report: Report, backend: Backend | None = None, shrink_backend: Backend | None = None) -> Report:
    """The whole run. backend: where, one world size after the other; None: as the plan says, several at a time if it
    says so. shrink_backend: where failures are shrunk, a simulation if none is given; a backend that simulates is its
    own.

    Raises `backends.Unavailable` where it cannot be carried out; whatever is found is in the report.
    """
    side = backend is None and min(plan.jobs, len(plan.worlds)) > 1
    backend = open_backend(plan.backend) if backend is None else backend
    if shrink_backend is None:
        shrink_backend = backend if isinstance(backend, SimBackend) else SimBackend()
    report.say(f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    started = time.perf_counter()
    try:
        with report:
            if side:
                try:
                    side_by_side.run_worlds(plan, report)
                finally:
                    report.seconds = time.perf_counter() - started
            else:
                for world in plan.worlds:
                    run_world(plan, report, backend, shrink_backend, world)
            if plan.real_size:
                run_real_size(plan, report, backend)
    except KeyboardInterrupt:
        report.interrupt()
        report.summary()
        raise
    finally:
        backend.close()
        shrink_backend.close()
    report.summary()
    return report
