"""World sizes side by side: as many processes as run at a time, each of which draws and judges, with ranks of its own.

On one world size the ranks wait for the judge and the judge for the ranks, so that cores stand idle. What is drawn is
the same as on one world size after the other. A process is sent a world size, and when it is over the next one, or None
to end: to begin anew for each, with all that is imported, takes six seconds of a core. It sends messages (kind, what)
to the one that began the run:

    line      something that it says
    begin     a part of so many examples: (title, goal)
    advance   one more example: the worst error / bound so far
    end       the part is over
    over      the world size is done: its record, as `RunRecord.to_dict` has it, and its rows, in the order in which
              they began, which the record does not keep
    error     it could not: the exception
"""

from __future__ import annotations

import io
import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.text import Text

from verification.report.progress import RunPart
from verification.report.report import Report
from verification.report.run_record import RunRecord
from verification.run.backends import SimBackend, Unavailable, open_backend
from verification.runner import RunPlan, run_world

ENDING = 15.0  # seconds that a process is given to sum up and to end its ranks


def run_worlds(plan: RunPlan, report: Report) -> None:
    """All world sizes of the plan, `plan.jobs` at a time; what they found is in the report.

    Raises what one of them raised, KeyboardInterrupt, and Unavailable for one that ended without a word.
    """
    waiting, running = list(plan.worlds), dict[Connection, _Process]()
    found = dict[int, RunRecord]()
    try:
        for _ in range(min(plan.jobs, len(waiting))):
            process = _Process.begin(plan, report, waiting.pop(0))
            running[process.connection] = process
        while running:
            _listen(report, running, found, waiting)
    except KeyboardInterrupt:
        for one in running.values():
            one.process.terminate()  # as if it had been interrupted itself
        last = time.monotonic() + ENDING
        while running and (left := last - time.monotonic()) > 0.0:
            _listen(report, running, found, [], left, ending=True)
        raise
    finally:
        for one in running.values():
            one.process.terminate()
        for one in running.values():
            one.stop()
        for size in plan.worlds:  # whichever was done first
            if size in found:
                report.add(found[size])


def _listen(
    report: Report, running: dict[Connection, _Process], found: dict[int, RunRecord], waiting: list[int],
    timeout: float | None = None, ending: bool = False,
) -> None:  # fmt: skip
    """Take the messages that are there, or wait for the first. waiting: the world sizes that nobody has begun yet.
    ending: a process may end without a word."""
    for connection in wait(list(running), timeout):
        assert isinstance(connection, Connection)
        process, over = running[connection], ending
        try:
            over = process.hear(report)
        except Unavailable:
            if not ending:
                raise
        if process.record is not None:
            found[process.world] = process.record
        if over and waiting:
            process.go_on(waiting.pop(0))
        elif over:
            process.go_on(None)
            running.pop(connection).stop()


@dataclass
class _Process:
    """A process, and the world size that is under way in it."""

    world: int
    process: SpawnProcess
    connection: Connection
    part: RunPart | None = None
    record: RunRecord | None = None  # once it is over

    @classmethod
    def begin(cls, plan: RunPlan, report: Report, world: int) -> _Process:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        shown = report.console.is_terminal, report.console.width, report.verbose
        process = context.Process(target=_run_several, args=(there, plan, *shown))
        # Ctrl-C reaches every process of a terminal: only this one heeds it, and tells the others by SIGTERM. What is
        # blocked here while a process starts is blocked there for good.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        there.close()
        begun = cls(world, process, here)
        begun.go_on(world)
        return begun

    def go_on(self, world: int | None) -> None:
        """With this world size; None: it is to end."""
        if world is not None:
            self.world, self.part, self.record = world, None, None
        with suppress(OSError):  # of one that has ended, which the next message of it would tell
            self.connection.send(world)

    def hear(self, report: Report) -> bool:
        """Take one message; whether it was the last one."""
        try:
            kind, what = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(ENDING)
            raise Unavailable(
                f"the process of world {self.world} ended with exit status {self.process.exitcode}"
            ) from None
        if kind == "line":
            report.console.print(Text.from_ansi(what), soft_wrap=True)
        elif kind == "begin":
            self.part = report.progress.begin(*what)
        elif kind == "advance" and self.part is not None:
            self.part.advance(what)
        elif kind == "end" and self.part is not None:
            self.part.end()
        elif kind == "over":
            data, rows = what
            self.record = RunRecord()
            self.record.restore(data)
            self.record.rows = rows
        elif kind == "error":
            raise what
        return kind == "over"

    def stop(self) -> None:
        """Wait for its end; one that does not come to it is killed."""
        self.process.join(ENDING)
        if self.process.is_alive():
            self.process.kill()
        self.connection.close()


# --- in such a process ------------------------------------------------------------------------------------------------


def _run_several(connection: Connection, plan: RunPlan, terminal: bool, width: int, verbose: bool) -> None:
    for world in iter(connection.recv, None):
        _run_one(connection, plan, world, terminal, width, verbose)


def _run_one(connection: Connection, plan: RunPlan, world: int, terminal: bool, width: int, verbose: bool) -> None:
    told = _Told(connection)
    signal.signal(signal.SIGTERM, told.interrupt)
    console = Console(file=cast(IO[str], _Lines(connection)), width=width, force_terminal=terminal)
    report = Report(console, verbose=verbose, progress=told)
    try:
        _draw_and_check(plan, report, world)
    except KeyboardInterrupt:
        report.interrupt()
    except BaseException as error:
        if not isinstance(error, Unavailable):  # a traceback does not come with it
            error.add_note(f"world {world}: {traceback.format_exc()}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # between world sizes there is nothing to tell
        connection.send(("error", error))
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection.send(("over", (report.to_dict(), report.rows)))


def _draw_and_check(plan: RunPlan, report: Report, world: int) -> None:
    backend = open_backend(plan.backend)
    shrink_backend = backend if isinstance(backend, SimBackend) else SimBackend()
    try:
        run_world(plan, report, backend, shrink_backend, world)
    finally:
        backend.close()
        shrink_backend.close()


class _Lines(io.TextIOBase):
    """A text file whose lines are messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._begun = connection, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._connection.send(("line", line))
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)


@dataclass
class _Told:
    """A `verification.report.progress.ShownProgress`, and its parts, whose events are messages."""

    connection: Connection
    interrupted: bool = False

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.interrupted = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def __enter__(self) -> _Told:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, title: str, goal: int) -> RunPart:
        self.connection.send(("begin", (title, goal)))
        return self

    def advance(self, worst: float) -> None:
        self.connection.send(("advance", worst))
        if self.interrupted:  # and what was raised then came to a place that drops exceptions, such as __del__
            raise KeyboardInterrupt

    def end(self) -> None:
        self.connection.send(("end", None))
