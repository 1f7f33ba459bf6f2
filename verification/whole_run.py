"""The main job: for each world size examples, then laws; at the end one problem of real size.

Ranks and judge wait for each other, which leaves cores idle. So several world sizes run at a time, each in its own
process, which prints its progress and sends back its results. The drawn examples do not depend on it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from threading import Thread
from types import FrameType
from typing import Any

from verification.console import Console
from verification.report.coverage import Coverage
from verification.report.report import Report
from verification.report.run_record import RunRecord
from verification.run.backends import Backend, SimBackend, Unavailable, open_backend
from verification.runner import RunPlan, run_real_size, run_world

ENDING = 15.0  # seconds in which a process must send its results and end its ranks


def run(
    plan: RunPlan, report: Report, backend: Backend | None = None, shrink_backend: Backend | None = None,
    hours: float = 0.0,
) -> Report:  # fmt: skip
    """Run the plan; repeat it with the next seed until `hours` have passed or an example fails.

    backend: runs one world size after the other; None: the plan's backend, `plan.jobs` world sizes at a time.
    shrink_backend: shrinks failures; None: the backend if it is a simulation, else a new simulation.

    Raises `backends.Unavailable` if it cannot be carried out; the results so far are in the report.
    """
    last = time.monotonic() + 3600 * hours
    try:
        _run_once(plan, report, backend, shrink_backend)
        while not report.failures and time.monotonic() < last:
            plan = replace(plan, seed=plan.seed + 1, real_size=0)
            report.extras["seed"] = plan.seed
            _run_once(plan, report, backend, shrink_backend)
    except KeyboardInterrupt:
        report.interrupt()
        report.summary()
        raise
    report.summary()
    return report


def _run_once(plan: RunPlan, report: Report, backend: Backend | None, shrink_backend: Backend | None) -> None:
    side_by_side = backend is None and min(plan.jobs, len(plan.worlds)) > 1
    backend = open_backend(plan.backend) if backend is None else backend
    if shrink_backend is None:
        shrink_backend = backend if isinstance(backend, SimBackend) else SimBackend()
    report.say(f"seed {plan.seed}; repeat this run with --seed {plan.seed}")
    try:
        if side_by_side:
            _run_side_by_side(plan, report)
        for number, world in enumerate(() if side_by_side else plan.worlds, 1):
            try:
                run_world(plan, report, backend, shrink_backend, world)
            except BaseException as error:
                report.not_run(plan.worlds[number:], error)
                raise
        if plan.real_size:
            run_real_size(plan, report, backend)
    finally:
        backend.close()
        shrink_backend.close()


@dataclass
class _Process:
    """A process, with the world size that it runs."""

    world: int
    process: SpawnProcess
    connection: Connection

    @classmethod
    def begin(cls, plan: RunPlan, report: Report, world: int) -> _Process:
        context = multiprocessing.get_context("spawn")
        connection, remote = context.Pipe()
        process = context.Process(target=_run_alone, args=(remote, plan, world, report.verbose))
        # Ctrl-C reaches every process of a terminal: only this one handles it, and sends SIGTERM to the others. A child
        # inherits the signals that are blocked here, for good.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        remote.close()
        return cls(world, process, connection)

    def answer(self) -> Any:
        """Wait for the results that it sends at its end; None if it ended without sending any."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(ENDING)
            return None

    def stop(self) -> None:
        """Wait for its end, and kill it if it does not end in time."""
        self.process.join(ENDING)
        self.process.kill()
        self.connection.close()


def _run_side_by_side(plan: RunPlan, report: Report) -> None:
    """Run all world sizes, `plan.jobs` at a time; the report has their results in the order of the plan.

    Raises the exception of a process, KeyboardInterrupt, and Unavailable for a process that ended without results.
    """
    waiting, running, records = list(plan.worlds), dict[Connection, _Process](), dict[int, RunRecord]()
    started = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < plan.jobs:
                process = _Process.begin(plan, report, waiting.pop(0))
                running[process.connection] = process
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                process = running.pop(connection)
                answer = process.answer()
                process.stop()
                if answer is None:
                    status = process.process.exitcode
                    raise Unavailable(f"the process of world {process.world} ended with exit status {status}")
                if isinstance(answer, BaseException):
                    raise answer
                records[process.world] = _record(answer)
    except BaseException as error:
        report.not_run(waiting, error)
        raise
    finally:
        for process in running.values():
            process.process.terminate()
        last = time.monotonic() + ENDING
        for process in running.values():
            answer = process.answer() if process.connection.poll(max(0.0, last - time.monotonic())) else None
            process.stop()
            if isinstance(answer, tuple):
                records[process.world] = _record(answer)
        for world in plan.worlds:
            if world in records:
                report.add(records[world])
        report.seconds += time.perf_counter() - started


def _record(answer: tuple[Any, ...]) -> RunRecord:
    rows, failures, examples, distributed, coverage = answer
    return RunRecord(rows, failures, examples, distributed, coverage=Coverage(*coverage))


def _run_alone(connection: Connection, plan: RunPlan, world: int, verbose: bool) -> None:
    """Run one world size in this process, and send its results or its exception. SIGTERM interrupts it: it then sends
    the results so far."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 3.0)  # repeat it, in case the exception is swallowed
        raise KeyboardInterrupt

    def end_with_the_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    Thread(target=end_with_the_parent, daemon=True).start()
    report = Report(Console(terminal=False), verbose=verbose)
    answer: Any
    try:
        _run_world(plan, report, world)
        coverage = report.coverage.cases, report.coverage.counts, report.coverage.largest
        answer = report.rows, report.failures, report.examples, report.distributed, coverage
    except BaseException as error:
        if not isinstance(error, (Unavailable, KeyboardInterrupt)):
            traceback.print_exc()  # the pickled exception has no traceback
        answer = error
    with suppress(OSError):  # the parent has ended
        connection.send(answer)


def _run_world(plan: RunPlan, report: Report, world: int) -> None:
    """Run the world size to its end or to an interrupt."""
    backend = open_backend(plan.backend)
    shrink_backend = backend if isinstance(backend, SimBackend) else SimBackend()
    try:
        run_world(plan, report, backend, shrink_backend, world)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        report.interrupt()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        backend.close()
        shrink_backend.close()
