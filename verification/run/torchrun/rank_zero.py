"""Rank 0's end of the connections to the agents: messages to and from them, and their loss."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from verification.failures import name_ranks
from verification.run.backends import Unavailable
from verification.run.processes.pool import START_TIMEOUT
from verification.run.processes.worker import limit_sends
from verification.run.torchrun.agents import JOIN_TIMEOUT, Address, Agent, RankZeroLost, connect, listen
from verification.run.torchrun.welcome import Hello, Welcome

SLACK = 2.0  # seconds that an agent may take beyond the time of its rank
FAREWELL = 10.0  # seconds for all agents to end their ranks and exit
LEAVE = 1.0  # seconds in which agents that torchrun terminates say so
BEAT = 1.0  # seconds between signs of life


class AgentLost(BaseException):
    """A process that torchrun started is gone or does not answer, or torchrun ends them all.

    No `Exception`: no example must be shrunk for it, and nothing can run after it. ranks: of the lost processes, empty
    if unknown. silent: they may still exist, but do not answer."""

    def __init__(self, ranks: Iterable[int], silent: bool = False) -> None:
        self.ranks, self.silent = tuple(sorted(ranks)), silent
        became = "does not answer; it may be stopped by a signal" if silent else "is gone"
        super().__init__(
            f"the process that torchrun started for {name_ranks(self.ranks)} {became}"
            if self.ranks
            else "torchrun ends all its processes"
        )


class Agents:
    """Rank 0's end of the connections to all agents, its own among them."""

    def __init__(self, address: Address, timeout: float) -> None:
        """Wait until all agents are connected. Raises Unavailable naming those that are not within a minute.
        timeout: of the agent of this process (`agents.Agent`)."""
        self.address = address
        self.generation = 0
        self.ending = False
        self.loss: AgentLost | None = None
        self.answers: list[deque[tuple[int, int, bytes]]] = [deque() for _ in range(address.world_size)]
        self.exits: dict[int, int | None] = {}
        self._replies: dict[int, dict[int, Any]] = {}
        self._questions = 0
        self._leaving: set[int] = set()
        self._terminated = False  # torchrun sent SIGTERM
        self._interrupted = False  # SIGINT came, and `raise_pending` has not raised it yet
        self._bell, self._rings = os.pipe()
        self._store = address.store()
        listener, word = listen(address, self._store)
        threading.Thread(target=self._serve_own, args=(timeout,), daemon=True).start()
        self._connections: dict[int, Connection] = {}
        self._sending = [threading.Lock() for _ in range(address.world_size)]  # by rank
        self._parted = threading.Event()
        self.hellos: dict[int, Hello] = {}
        try:
            self._welcome(listener, word)
        finally:
            listener.close()
        threading.Thread(target=self._beat, daemon=True).start()

    def _serve_own(self, timeout: float) -> None:
        with suppress(RankZeroLost):  # this process ends, too, and reports the reason itself
            Agent(self.address, connect(self.address, self._store), timeout).serve()

    def _beat(self) -> None:
        """Send each agent a sign of life every second, unless another message is being sent to it."""
        while not self._parted.wait(BEAT):
            for rank, connection in list(self._connections.items()):
                if self._sending[rank].acquire(blocking=False):
                    try:
                        with suppress(OSError):  # `_take` finds that it is gone
                            connection.send(("beat", 0, None))
                    finally:
                        self._sending[rank].release()

    def _welcome(self, listener: socket.socket, word: str) -> None:
        welcome = Welcome(listener, word.encode(), self.address.world_size)
        welcome.run(JOIN_TIMEOUT)
        if dropped := welcome.dropped():
            print(f"rank 0 {dropped}", file=sys.stderr, flush=True)
        for rank, (hello, connection) in welcome.agents.items():
            limit_sends(connection, START_TIMEOUT)
            self.hellos[rank], self._connections[rank] = hello, connection
        missing = set(range(self.address.world_size)) - set(self.hellos)
        if missing:
            raise Unavailable(f"{name_ranks(sorted(missing))} did not come in {JOIN_TIMEOUT:.0f} s")

    @property
    def one_machine(self) -> bool:
        return len({hello.machine for hello in self.hellos.values()}) == 1

    def on_sigterm(self, *_: object) -> None:
        """Handle SIGTERM, which torchrun sends to all processes. `raise_pending` raises later, since raising here could
        leave a message half sent, or be swallowed by a callback."""
        if not self._terminated:
            self._terminated = True
            os.write(self._rings, b"!")  # wakes `_take`

    def on_sigint(self, *_: object) -> None:
        """Handle SIGINT; `raise_pending` raises later. A second one before that changes nothing."""
        if not self._interrupted:
            self._interrupted = True
            os.write(self._rings, b"!")

    def raise_pending(self) -> None:
        """Raise AgentLost if torchrun is ending all processes or an agent is lost, KeyboardInterrupt after SIGINT."""
        if self.loss is None and self._terminated:
            self.lose(self._culprits())
        if self.loss is not None:
            raise self.loss
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def send(self, ranks: Iterable[int], what: str, number: int, arguments: Iterable[Any]) -> None:
        """Send (what, number, argument) to each rank's agent. Raises AgentLost as `raise_pending` does."""
        self.raise_pending()
        self._send(ranks, what, number, arguments)

    def _send(self, ranks: Iterable[int], what: str, number: int, arguments: Iterable[Any]) -> None:
        for rank, argument in zip(ranks, arguments, strict=True):
            # An agent that does not read, or is gone, shows later, by not answering.
            with suppress(OSError), self._sending[rank]:
                self._connections[rank].send((what, number, argument))

    def ask(self, ranks: Collection[int], what: str, argument: Any, timeout: float) -> dict[int, Any]:
        """Send a question to each rank's agent; return the replies in time, by rank. Raises AgentLost."""
        self._questions += 1
        number = self._questions
        replies = self._replies[number] = {}
        self.send(ranks, what, number, [argument] * len(ranks))
        deadline = time.monotonic() + timeout
        while len(replies) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
            self.pump(remaining)
        return self._replies.pop(number)

    def pump(self, timeout: float) -> None:
        """Receive from the agents: at least one message, unless the timeout is over first. Raises AgentLost."""
        self.raise_pending()
        lost = self._take(timeout) - self._leaving
        if lost:
            raise self.lose(lost)
        self.raise_pending()

    def ask_all(self, ranks: Collection[int], what: str, argument: Any, timeout: float) -> dict[int, Any]:
        """Ask like `ask`; an agent whose reply does not come in time is lost."""
        replies = self.ask(ranks, what, argument, timeout)
        silent = set(ranks) - set(replies)
        if silent:
            for rank in silent:
                self._connections.pop(rank)  # `farewell` must not wait for it
            raise self.lose(silent, silent=True)
        return replies

    def lose(self, ranks: Collection[int], silent: bool = False) -> AgentLost:
        """Record that these agents are gone, or silent, so that nothing can run any more; return the error."""
        self.ending, self.loss = True, AgentLost(ranks, silent)
        return self.loss

    def _take(self, timeout: float) -> set[int]:
        """Receive and sort messages of the agents; return the ranks whose agents are gone."""
        ranks = {connection: rank for rank, connection in self._connections.items()}
        lost = set()
        for ready in wait([*ranks, self._bell], timeout):
            if ready == self._bell:
                os.read(self._bell, 64)
                continue
            assert isinstance(ready, Connection)
            try:
                self._sort(ranks[ready], *ready.recv())
            except (EOFError, OSError):
                lost.add(ranks[ready])
        return lost

    def _sort(self, rank: int, what: str, number: int, value: Any) -> None:
        if what == "leaving":
            self._leaving.add(rank)
        elif what == "reply":
            if number in self._replies:
                self._replies[number][rank] = value
        elif number == self.generation:  # ignore messages of ranks that have been replaced
            if what == "answer":
                self.answers[rank].append(value)
            else:
                assert what == "died", what
                self.exits[rank] = value

    def _culprits(self) -> set[int]:
        """Return the agents whose end made torchrun terminate all others."""
        deadline, lost = time.monotonic() + LEAVE, set[int]()
        while (remaining := deadline - time.monotonic()) > 0 and self._connections:
            lost |= self._take(remaining) - self._leaving
            for rank in lost | self._leaving:
                self._connections.pop(rank, None)
        return lost

    def renew(self) -> None:
        """Begin the next generation; older messages are ignored from now on."""
        self.generation += 1
        self.exits.clear()
        for queue in self.answers:
            queue.clear()

    def farewell(self, status: int) -> None:
        """Have all agents end their ranks and exit with that status; the caller should exit with it, too."""
        self.ending = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once one exits with a status other than 0
        self._parted.set()
        live = list(self._connections)
        self._send(live, "bye", 0, [status] * len(live))
        deadline = time.monotonic() + FAREWELL
        while self._connections and (remaining := deadline - time.monotonic()) > 0:
            for rank in self._take(remaining):
                del self._connections[rank]
