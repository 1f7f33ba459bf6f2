"""The main job: for each world size examples, then laws; at the end one problem of real size.

Ranks and judge wait for each other, so that cores stand idle: so several world sizes run at a time, each in a process
of its own, which prints as it goes and sends back what it found. What is drawn does not depend on it.
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

from rich.console import Console

from verification.report.coverage import Coverage
from verification.report.report import Report
from verification.report.run_result import RunRecord
from verification.run.backends import Backend, SimBackend, Unavailable, open_backend
from verification.runner import RunPlan, run_real_size, run_world

ENDING = 15.0  # seconds that a process is given to sum up and to end its ranks


def run(
    plan: RunPlan, report: Report, backend: Backend | None = None, shrink_backend: Backend | None = None,
    hours: float = 0.0,
) -> Report:  # fmt: skip
    """Run the plan; then, until so many hours have passed or something fails, again with the next seed.

    backend: where, one world size after the other; None: as the plan says, several at a time if it says so.
    shrink_backend: where failures are shrunk, a simulation if none is given; a backend that simulates is its own.

    Raises `backends.Unavailable` where it cannot be carried out; whatever is found is in the report.
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
        with report:
            for world in () if side_by_side else plan.worlds:
                run_world(plan, report, backend, shrink_backend, world)
            if plan.real_size:
                run_real_size(plan, report, backend)
    finally:
        backend.close()
        shrink_backend.close()


@dataclass
class _Process:
    """A process with the world size that is under way in it."""

    world: int
    process: SpawnProcess
    connection: Connection

    @classmethod
    def begin(cls, plan: RunPlan, report: Report, world: int) -> _Process:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_run_alone, args=(there, plan, world, report.console.width, report.verbose))
        # Ctrl-C reaches every process of a terminal: only this one heeds it, and tells the others by SIGTERM. What is
        # blocked here while a process starts is blocked there for good.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        there.close()
        return cls(world, process, here)

    def answer(self) -> Any:
        """Wait for what it sends when it is over; None for one that ended without a word."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(ENDING)
            return None

    def stop(self) -> None:
        """Wait for its end; one that does not come to it is killed."""
        self.process.join(ENDING)
        self.process.kill()
        self.connection.close()


def _run_side_by_side(plan: RunPlan, report: Report) -> None:
    """All world sizes, `plan.jobs` at a time; what they found is in the report, in the order of the plan.

    Raises what one of them raised, KeyboardInterrupt, and Unavailable for one that ended without a word.
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
    rows, failures, examples, distributed, covered = answer
    return RunRecord(rows, failures, examples, distributed, coverage=Coverage(*covered))


def _run_alone(connection: Connection, plan: RunPlan, world: int, width: int, verbose: bool) -> None:
    """Run one world size in a process of its own, and send what held and failed, or what was raised. SIGTERM
    interrupts it: it then sends what held until then."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 3.0)  # once more, if this one comes to a place that drops exceptions
        raise KeyboardInterrupt

    def end_with_the_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    Thread(target=end_with_the_parent, daemon=True).start()
    report = Report(Console(width=width, force_terminal=False), verbose=verbose)
    answer: Any
    try:
        _run_world(plan, report, world)
        covered = report.coverage.cases, report.coverage.counts
        answer = report.rows, report.failures, report.examples, report.distributed, covered
    except BaseException as error:
        if not isinstance(error, (Unavailable, KeyboardInterrupt)):
            traceback.print_exc()  # it does not come with the exception
        answer = error
    with suppress(OSError):  # nobody listens any more
        connection.send(answer)


def _run_world(plan: RunPlan, report: Report, world: int) -> None:
    """The world size, up to its end or to an interrupt."""
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
