"""The processes that torchrun started. Each is an agent: it runs one rank as a child process, and obeys rank 0.

A rank that hangs in a kernel or in NCCL can neither report its stack nor be used again. Its agent can take the stack,
end the rank and start another. Agent 0 runs in the process that also draws and judges. Agents talk over their own
sockets, whose address is in torchrun's store, not through the group under test. Pickles pass over them: on one host
these are Unix sockets, and both ends look whose process the other is, since the store is open to strangers.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from verification.run.processes.rendezvous import Membership, Rendezvous
from verification.run.processes.worker import PoolError, Ranks
from verification.run.torchrun.welcome import MAX_CALLERS, Hello, introduce, is_ours

NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = 60.0  # seconds for all agents to connect
SILENCE = 4.0  # seconds without an answer, beyond the time of the task itself, after which a process counts as lost
_ADDRESS = "verification/agent 0"
_TERMINATED = 128 + signal.SIGTERM  # the exit status that a shell reports for it


class NotUnderTorchrun(RuntimeError):
    """The environment lacks what torchrun sets."""


@dataclass(frozen=True)
class Address:
    """The environment of a process that torchrun started."""

    rank: int
    local_rank: int
    world_size: int
    host: str  # of the common store
    port: int
    served: bool  # True if torchrun itself serves the store; otherwise rank 0 does
    one_host: bool  # True if one torchrun started all processes

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Address:
        """Read torchrun's environment variables. Raises NotUnderTorchrun if some are missing."""
        missing = [name for name in NEEDED if name not in environment]
        if missing:
            raise NotUnderTorchrun(f"{', '.join(missing)} not set")
        rank, local_rank, world_size, host, port = (environment[name] for name in NEEDED)
        served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        one_host = environment.get("LOCAL_WORLD_SIZE") == world_size
        return cls(int(rank), int(local_rank), int(world_size), host, int(port), served, one_host)

    def store(self) -> Store:
        """Open the common store. Keep a reference: on rank 0 it may be the server."""
        serves, wait_at_most = self.rank == 0 and not self.served, timedelta(seconds=JOIN_TIMEOUT)
        tcp = TCPStore(self.host, self.port, is_master=serves, wait_for_workers=False, timeout=wait_at_most)
        return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)


@dataclass(frozen=True)
class Orders:
    """The arguments with which an agent starts a rank of a generation."""

    generation: int
    world_size: int
    rendezvous: Rendezvous
    preload: tuple[str, ...]
    joined_by: str
    one_machine: bool
    timeout: float


def listen(address: Address, store: Store) -> tuple[socket.socket, str]:
    """Open rank 0's listening socket. Also returns the secret word that proves an agent to be of this run."""
    listener = (_listen_here if address.one_host else _listen_tcp)(address)
    place = listener.getsockname()
    word = secrets.token_hex(16)
    store.set(_ADDRESS, f"{place[1:].decode() if address.one_host else f'{place[0]} {place[1]}'} {word}")
    return listener, word


def _backlog(address: Address) -> int:
    return MAX_CALLERS + address.world_size


def _listen_here(address: Address) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"")  # the kernel chooses a name outside the file system
    listener.listen(_backlog(address))
    return listener


def _listen_tcp(address: Address) -> socket.socket:
    # Use the address by which this machine reaches the store: the others can reach that one.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        host = probe.getsockname()[0]
    return socket.create_server((host, 0), backlog=_backlog(address))


def connect(address: Address, store: Store) -> Connection:
    """Connect to rank 0, and introduce this agent. Raises PermissionError if the socket is another user's."""
    *place, word = store.get(_ADDRESS).decode().split()
    # Before it connects: counting may take seconds.
    hello = Hello(address.rank, os.getpid(), socket.gethostname(), torch.cuda.device_count(), address.local_rank)
    return introduce(_call_here(*place) if address.one_host else _call_tcp(*place), word, hello)


def _call_here(name: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.connect(b"\0" + name.encode())
    if not is_ours(end):
        end.close()
        raise PermissionError("the socket named in torchrun's store belongs to another user")
    return end


def _call_tcp(host: str, port: str) -> socket.socket:
    return socket.create_connection((host, int(port)), timeout=JOIN_TIMEOUT)


class RankZeroLost(RuntimeError):
    """The process that torchrun started for rank 0, which writes all output, is gone or gives no sign of life."""


class Agent:
    """A server of rank 0's orders, until rank 0 says "bye" or is gone. timeout: seconds, beyond SILENCE, without rank
    0's sign of life, which it sends every second.

    Messages from rank 0 are (what, number, argument), those to it (what, number, value). A reply has the number of its
    question; a message of a rank has its generation.
    """

    def __init__(self, address: Address, control: Connection, timeout: float) -> None:
        self._address, self._control, self._timeout = address, control, timeout + SILENCE
        self._ranks: Ranks | None = None
        self._watched = False
        self._generation = 0

    def serve(self) -> int:
        """Serve rank 0; return the exit status for this process. Raises RankZeroLost."""
        bell, rings = os.pipe()
        os.set_blocking(rings, False)
        if self._address.rank:  # the agent of rank 0 does not run in the main thread
            signal.set_wakeup_fd(rings, warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, lambda *_: None)  # the wakeup pipe suffices; interrupt no message
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends this process
        heard = time.monotonic() + JOIN_TIMEOUT  # rank 0 gives no sign of life before all agents have come
        try:
            while True:
                watched = self._ranks.fileno() if self._ranks and self._watched else None
                remaining = max(0.0, heard + self._timeout - time.monotonic())
                ready = wait([self._control, bell] if watched is None else [self._control, bell, watched], remaining)
                if not ready:
                    raise RankZeroLost(f"gave no sign of life for {self._timeout:g} s; it may be stopped by a signal")
                if bell in ready and signal.SIGTERM in os.read(bell, 64):
                    self._send("leaving", 0, None)  # tells rank 0 that this agent was terminated, not lost
                    return _TERMINATED
                if watched in ready:
                    self._forward()
                if self._control in ready:
                    heard = time.monotonic()
                    status = self._obey(*self._control.recv())
                    if status is not None:
                        return status
        except (EOFError, ConnectionError) as error:
            raise RankZeroLost("is gone") from error
        finally:
            self._end()

    def _send(self, what: str, number: int, value: Any) -> None:
        self._control.send((what, number, value))

    def _obey(self, what: str, number: int, argument: Any) -> int | None:
        """Carry out one message of rank 0; return the exit status if it is the last."""
        if what == "call":
            if self._ranks is not None:
                self._ranks.send([argument])
        elif what == "start":
            self._send("reply", number, self._start(argument))
        elif what == "stacks":
            self._send("reply", number, self._ranks.stacks([0])[0] if self._ranks else "")
        elif what == "records":
            self._send("reply", number, self._ranks.records([0]).get(0) if self._ranks else None)
        elif what == "any runnable":
            self._send("reply", number, self._ranks is not None and self._ranks.any_runnable([0]))
        elif what in ("end", "ping"):
            if what == "end":
                self._end()
            self._send("reply", number, None)
        elif what == "bye":
            return int(argument)
        else:  # a sign of life, which needs no reply
            assert what == "beat", what
        return None

    def _start(self, orders: Orders) -> tuple[int, str]:
        """Replace the rank by a new one; return its (pid, "") or, if it does not start, (0, error)."""
        self._end()
        self._generation = orders.generation
        member = Membership(
            self._address.rank, orders.world_size, orders.rendezvous, orders.preload, orders.joined_by,
            gpu=self._address.local_rank, one_machine=orders.one_machine,
        )  # fmt: skip
        self._ranks = Ranks([member], orders.timeout)
        try:
            self._ranks.start()
        except PoolError as error:
            return 0, str(error)
        self._watched = True
        return self._ranks.pids[0], ""

    def _forward(self) -> None:
        """Forward the rank's messages to rank 0."""
        assert self._ranks is not None
        for _, died in self._ranks.events(0.0):
            answer = None if died else self._ranks.receive(0)
            if answer is None:
                self._watched = False
                self._send("died", self._generation, self._ranks.exit_code(0))
                return
            self._send("answer", self._generation, answer)

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
            self._ranks, self._watched = None, False
