"""The processes of the pool: their start, both ends of the pipes to them, and the loop of a rank.

`Ranks` is the parent's side of one generation of ranks. `main` is the rank's side: it joins the process group
(`verification.run.processes.rendezvous`), then serves calls until its parent closes the pipe or dies.

Do not import torch here: ranks get it from the forkserver's preload, and check that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from verification.failures import Malformed, MismatchedMessages, Raised
from verification.run.processes import flight_record
from verification.run.processes.process_state import is_runnable, is_stopped
from verification.run.processes.process_tree import descendants
from verification.run.processes.rendezvous import LocalRendezvous, Membership, join_group

PR_SET_CHILD_SUBREAPER = 36  # of Linux' prctl: orphans among its descendants become its children
STACK_SIGNAL = signal.SIGUSR1
ANSWERED, RAISED = 0, 1
MAX_TEXT = 20_000  # characters of an exception's message, or traceback
REQUEST = struct.Struct("<Q")  # number of the call; then a pickle: (function, args)
ANSWER = struct.Struct("<QB")  # number of the call, ANSWERED or RAISED; then one pickle: the result or a Raised

LOOKS, LOOK_EVERY = 5, 0.02  # how often, and the seconds between
STACK_TIMEOUT = 1.0  # for a rank to write its stack
RECORD_TIMEOUT = 20.0  # for ranks to send their flight records: the first takes torch seconds
STOPPED = "(stopped by a signal)"  # in place of a stack, which a stopped rank cannot write

_IMPORTED_BY = os.getpid()  # differs from the rank's own pid exactly if the forkserver preloaded this module
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}


class PoolError(RuntimeError):
    """The pool cannot work: it is closed, or its ranks do not start. It says nothing about the code under test."""


class Ranks:
    """One generation of rank processes, from their start to their end. A rank's number is its index in `members`."""

    def __init__(self, members: Sequence[Membership], timeout: float) -> None:
        self.world_size = len(members)
        self._members = tuple(members)
        self._timeout = timeout
        self._owner = os.getpid()
        self._processes: list[RankProcess] = []
        self._calls: list[Connection] = []
        self._stacks: list[Connection] = []
        self._records: list[Connection] = []
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """File descriptor that is readable while `events` has something to return."""
        return self._selector.fileno()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid or 0 for process in self._processes)

    def start(self) -> None:
        """Fork the processes; each sends an answer to call 0 when it has joined its peers."""
        for index, member in enumerate(self._members):
            calls, rank_calls = Pipe(duplex=True)
            stacks, rank_stacks = Pipe(duplex=False)
            records, rank_records = Pipe(duplex=True)
            self._calls.append(calls)
            self._stacks.append(stacks)
            self._records.append(records)
            process = RankProcess(member, rank_calls, rank_stacks, rank_records)
            try:
                process.start()
            except (EOFError, OSError) as error:
                raise PoolError("the forkserver died; a preloaded module may have ended it (see its stderr)") from error
            finally:
                rank_calls.close()
                rank_stacks.close()
                rank_records.close()
            self._processes.append(process)
            limit_sends(calls, self._timeout)
            self._selector.register(calls, selectors.EVENT_READ, (index, False))
            self._selector.register(process.sentinel, selectors.EVENT_READ, (index, True))

    def send(self, messages: Sequence[bytes]) -> None:
        """Send one message to each rank. A rank that does not read it shows later, by not answering."""
        for calls, message in zip(self._calls, messages, strict=True):
            with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
                calls.send_bytes(message)

    def events(self, timeout: float) -> list[tuple[int, bool]]:
        """Return (rank, True if it died) for every rank that has answered or died; answers before deaths."""
        events: list[tuple[int, bool]] = [key.data for key, _ in self._selector.select(timeout)]
        return sorted(events, key=lambda event: event[1])

    def receive(self, rank: int) -> tuple[int, int, bytes] | None:
        """Return (number of the call, ANSWERED or RAISED, pickle); None if the rank closed the pipe."""
        try:
            message = self._calls[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            return None
        sequence, status = ANSWER.unpack_from(message)
        return sequence, status, message[ANSWER.size :]

    def has_answer(self, rank: int, timeout: float) -> bool:
        return self._calls[rank].poll(timeout)

    def is_dead(self, rank: int) -> bool:
        return self._processes[rank].exitcode is not None

    def exit_code(self, rank: int) -> int | None:
        """Return the exit code of a rank that closed its pipe: negative for a signal, None while the process lives."""
        self._processes[rank].join(STACK_TIMEOUT)
        return self._processes[rank].exitcode

    def stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """Return the Python stacks of these ranks' threads; STOPPED for a stopped rank, the last dump of a dead one."""
        stopped = {rank for rank in ranks if is_stopped(self.pids[rank])}
        dumps = {rank: STOPPED.encode() if rank in stopped else b"" for rank in ranks}
        deadline = time.monotonic() + STACK_TIMEOUT
        with selectors.DefaultSelector() as selector:
            for rank in set(ranks) - stopped:
                selector.register(self._stacks[rank], selectors.EVENT_READ, rank)
                if not self.is_dead(rank):
                    with suppress(ProcessLookupError):
                        os.kill(self.pids[rank], STACK_SIGNAL)
            while selector.get_map():
                for key, _ in (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                    chunk = os.read(key.fd, 1 << 16)
                    dumps[key.data] += chunk
                    if not chunk or _is_complete(dumps[key.data]):
                        selector.unregister(key.fileobj)
                if not ready:
                    break
        return {rank: dump.decode(errors="replace") for rank, dump in dumps.items()}

    def records(self, ranks: Collection[int]) -> dict[int, bytes]:
        """Return the flight records of these ranks, without those that are stopped or do not answer in time."""
        records: dict[int, bytes] = {}
        running = [rank for rank in ranks if not is_stopped(self.pids[rank])]
        for rank in running:
            with suppress(OSError):
                self._records[rank].send_bytes(b"?")
        deadline = time.monotonic() + RECORD_TIMEOUT
        for rank in running:
            with suppress(EOFError, OSError):
                if self._records[rank].poll(max(0.0, deadline - time.monotonic())):
                    records[rank] = self._records[rank].recv_bytes()
        return records

    def any_runnable(self, ranks: Collection[int]) -> bool:
        """True if any of these ranks computes, or would if it had a processor, in a few samples of their threads."""
        for _ in range(LOOKS):
            if any(is_runnable(self.pids[rank]) for rank in ranks):
                return True
            time.sleep(LOOK_EVERY)
        return False

    def end(self) -> None:
        """Kill every rank, wait until it is gone, and close its pipes."""
        if os.getpid() != self._owner:
            return  # this process is a fork of the owner, so the ranks are not its children
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in (*self._calls, *self._stacks, *self._records):
            connection.close()
        self._selector.close()


class LocalRanks(Ranks):
    """Ranks that are all on this machine."""

    def __init__(self, world_size: int, preload: tuple[str, ...], timeout: float, joined_by: str) -> None:
        self._local = LocalRendezvous()
        rendezvous = self._local.rendezvous
        ranks = range(world_size)
        super().__init__([Membership(r, world_size, rendezvous, preload, joined_by, gpu=r) for r in ranks], timeout)

    def end(self) -> None:
        super().end()
        if os.getpid() == self._owner:
            self._local.close()


def _is_complete(dump: bytes) -> bool:
    """True if the dump ends as faulthandler's do: with the forkserver's frame, or with dots after 100 frames."""
    return dump.endswith((b" in <module>\n", b"  ...\n"))


def limit_sends(connection: Connection, seconds: float) -> None:
    """Make a send that blocks for longer raise BlockingIOError, as one to a stopped rank does."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


PACKAGE = str(Path(__file__).parents[2]) + os.sep  # verification/
_ADAPTERS = os.path.join(PACKAGE, "peers", "adapters")


class RankProcess(context.ForkServerProcess):
    """A process that runs `main`, forked from a server that has imported `membership.preload`."""

    def __init__(self, membership: Membership, calls: Connection, stacks: Connection, records: Connection) -> None:
        arguments = (membership, calls, stacks, records)
        super().__init__(name=f"rank {membership.rank}", target=main, args=arguments, daemon=True)
        self.preload = membership.preload

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 - multiprocessing's name for it
        return Popen(process_obj)


class Popen(popen_forkserver.Popen):
    """A variant of multiprocessing's Popen, with two differences.

    Each set of preloaded modules has its own server, where multiprocessing has one for the whole program. And the rank
    does not import the parent's `__main__` again: a heredoc or a notebook has none, pytest's costs more than the fork.
    """

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, data_w = server(process_obj.preload).connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        # Keep this end open: the rank's `parent_process().sentinel`, its other end, is readable once this process ends.
        parent_w = os.dup(data_w)
        self.finalizer = util.Finalize(self, util.close_fds, (parent_w, self.sentinel))  # type: ignore[attr-defined]
        with open(data_w, "wb", closefd=True) as pipe:
            pipe.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def server(preload: tuple[str, ...]) -> forkserver.ForkServer:
    """Return the forkserver with these modules. It starts on first use and ends after this process and all ranks."""
    if preload not in _servers:
        _servers[preload] = forkserver.ForkServer()
        # Preload this module last: it tells ranks that the preload took place.
        _servers[preload].set_forkserver_preload([*preload, __name__])
    with _server_environment():
        _servers[preload].ensure_running()
    return _servers[preload]


@contextmanager
def _server_environment() -> Iterator[None]:
    """Set one thread per rank, before numpy is imported, and the parent's module path, for the preload."""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def ending_children() -> Iterator[None]:
    """End what the block starts: children of a user's module and of ranks, also where their parents have ended."""
    before, prctl = descendants(os.getpid()), ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        servers: list[Any] = [resource_tracker._resource_tracker, *_servers.values()]  # these end with this process
        spared = {getattr(x, "_forkserver_pid", getattr(x, "_pid", None)) for x in servers}
        for pid in descendants(os.getpid()) - before - spared:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(membership: Membership, calls: Connection, stacks: Connection, records: Connection) -> None:
    """Serve calls until the parent is gone. Writes stacks to `stacks` on STACK_SIGNAL and on a fatal error, and flight
    records to `records` when asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the ranks
    gc.freeze()  # objects of the forkserver are never garbage: leave their pages shared
    faulthandler.enable(stacks.fileno())
    faulthandler.register(STACK_SIGNAL, stacks.fileno(), all_threads=True)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        check_preload(membership.preload)
        flight_record.enable()
        join_group(membership)
        threading.Thread(target=flight_record.serve, args=(records,), daemon=True).start()
        calls.send_bytes(ANSWER.pack(0, ANSWERED) + pickle.dumps(None))
    except Exception as error:
        calls.send_bytes(ANSWER.pack(0, RAISED) + pickle.dumps(describe(error)))
        return
    while True:
        try:
            calls.send_bytes(run_request(calls.recv_bytes()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the parent closed the pipe; a regular teardown would only print warnings


def exit_with_parent() -> None:
    """End this process when the parent ends, however that ended and wherever the main thread is blocked."""
    # PR_SET_PDEATHSIG would report the death of the forkserver, not of the parent.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def check_preload(preload: tuple[str, ...]) -> None:
    """Raise RuntimeError for modules that the forkserver failed to preload, which it hides (cpython#117378)."""
    missing = [name for name in preload if name not in sys.modules]
    if os.getpid() == _IMPORTED_BY and not missing:
        missing = [__name__]
    if not missing:
        return
    reasons = []
    for name in missing:
        try:
            importlib.import_module(name)
            reasons.append(f"{name} (a rank itself can import it)")
        except Exception as error:
            reasons.append(f"{name} ({type(error).__name__}: {error})")
    raise RuntimeError(f"the forkserver did not preload {', '.join(reasons)}")


def run_request(message: bytes) -> bytes:
    """Return the answer to one call; an exception of the function is an answer, too."""
    (sequence,) = REQUEST.unpack_from(message)
    try:
        function, args = pickle.loads(memoryview(message)[REQUEST.size :])
        return ANSWER.pack(sequence, ANSWERED) + pickle.dumps(function(*args), protocol=5)
    except BaseException as error:
        return ANSWER.pack(sequence, RAISED) + pickle.dumps(describe(error))
    finally:
        sys.stdout.flush()  # a rank ends by SIGKILL, which would lose its output


def _drop_own_frames(told: traceback.TracebackException) -> None:
    """Drop the frames of this package, which called the code under test, unless there are no others."""
    others = [x for x in told.stack if not x.filename.startswith(PACKAGE) or x.filename.startswith(_ADAPTERS)]
    if others:
        told.stack = traceback.StackSummary.from_list(others)
    for inner in (told.__cause__, told.__context__):
        if inner is not None:
            _drop_own_frames(inner)


def describe(error: BaseException) -> Raised:
    told = traceback.TracebackException.from_exception(error)
    _drop_own_frames(told)
    text = "" if isinstance(error, Malformed) else _shortened("".join(told.format()))
    kind: type[BaseException] = ValueError if isinstance(error, Malformed) else type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = _shortened(str(error))
    except Exception as second:
        message = f"its __str__ raised {type(second).__name__}"
    return Raised(name, message, text, isinstance(error, MismatchedMessages))


def _shortened(text: str) -> str:
    half = MAX_TEXT // 2
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:half]} ... {len(text) - MAX_TEXT} characters ... {text[-half:]}"
