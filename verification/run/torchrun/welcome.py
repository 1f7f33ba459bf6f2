"""The welcome of the agents at rank 0's socket, to which strangers may connect, too.

An agent says the run's secret word and its Hello at once. Nothing that a stranger sends is unpickled: on one host the
kernel tells whose process calls; between hosts the word must do, which torchrun's store gives to whoever reaches it.
No stranger holds rank 0: callers are heard side by side, each for some seconds, at most so many at a time, all before
one deadline.
"""

from __future__ import annotations

import hmac
import os
import pickle
import selectors
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

INTRODUCTION = 5.0  # seconds for a caller to introduce itself
MAX_CALLERS = 256  # who have not yet introduced themselves: beyond, the longest silent one is dropped
_SIZE = struct.Struct("!I")  # bytes of the pickled Hello, which follows the word and this
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a Unix socket


@dataclass(frozen=True)
class Hello:
    """The first message of an agent."""

    rank: int
    pid: int
    machine: str
    gpus: int  # visible to it
    local_rank: int


def introduce(end: socket.socket, word: str, hello: Hello) -> Connection:
    """Introduce an agent on its new socket; return the connection."""
    pickled = pickle.dumps(hello)
    end.sendall(word.encode() + _SIZE.pack(len(pickled)) + pickled)
    return _adopt(end)


def is_ours(end: socket.socket) -> bool:
    """True if a process of this user is at the other end. True for every TCP socket, which cannot tell."""
    if end.family != socket.AF_UNIX:
        return True
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _adopt(end: socket.socket) -> Connection:
    """Turn the socket into a connection without a timeout, which sends at once."""
    with end:
        end.settimeout(None)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(end.detach())


@dataclass
class _Caller:
    end: socket.socket
    host: str
    until: float  # when it must have introduced itself
    said: bytes = b""


@dataclass
class Welcome:
    """Callers at a listening socket, until all ranks have come. agents: Hello and connection of each rank that has.
    strangers: number of dropped callers by (host, reason)."""

    listener: socket.socket
    word: bytes
    world_size: int
    agents: dict[int, tuple[Hello, Connection]] = field(default_factory=dict)
    strangers: Counter[tuple[str, str]] = field(default_factory=Counter)
    _callers: dict[socket.socket, _Caller] = field(default_factory=dict)  # the longest silent first

    def run(self, seconds: float) -> None:
        """Return when all ranks have come, or after so many seconds."""
        deadline = time.monotonic() + seconds
        self.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while len(self.agents) < self.world_size and (now := time.monotonic()) < deadline:
                for caller in [caller for caller in self._callers.values() if caller.until <= now]:
                    self._drop(selector, caller, "did not introduce itself")
                first = min((caller.until for caller in self._callers.values()), default=deadline)
                # Hear callers before further ones come: agents are never the longest silent.
                ready = selector.select(max(0.0, min(first, deadline) - now))
                for key, _ in ready:
                    if key.fileobj is not self.listener:
                        self._hear(selector, self._callers[key.fileobj])  # type: ignore[index]
                if any(key.fileobj is self.listener for key, _ in ready):
                    self._accept(selector)
            for caller in list(self._callers.values()):
                self._drop(selector, caller, "did not introduce itself")

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            end, place = self.listener.accept()
        except OSError:  # it has gone
            return
        host = "this host" if end.family == socket.AF_UNIX else place[0]
        if not is_ours(end):
            end.close()
            self.strangers[host, "belongs to another user"] += 1
            return
        if len(self._callers) == MAX_CALLERS:
            self._drop(selector, next(iter(self._callers.values())), "was one of too many")
        end.setblocking(False)
        self._callers[end] = _Caller(end, host, time.monotonic() + INTRODUCTION)
        selector.register(end, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        """Read what a caller says, and not a byte more than its introduction."""
        try:
            said = caller.end.recv(self._missing(caller.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._drop(selector, caller, "hung up")
            return
        caller.said += said
        # Not before the word is whole: it could be guessed byte by byte.
        if len(caller.said) >= len(self.word) and not hmac.compare_digest(caller.said[: len(self.word)], self.word):
            self._drop(selector, caller, "said another word")
        elif not self._missing(caller.said):
            selector.unregister(caller.end)
            del self._callers[caller.end]
            hello = pickle.loads(caller.said[len(self.word) + _SIZE.size :])
            self.agents[hello.rank] = hello, _adopt(caller.end)

    def _missing(self, said: bytes) -> int:
        """Return how many bytes are missing of the word and the size, or, after these, of the Hello."""
        head = len(self.word) + _SIZE.size
        if len(said) < head:
            return head - len(said)
        return head + int(_SIZE.unpack_from(said, len(self.word))[0]) - len(said)

    def _drop(self, selector: selectors.BaseSelector, caller: _Caller, why: str) -> None:
        selector.unregister(caller.end)
        del self._callers[caller.end]
        with suppress(OSError):
            caller.end.close()
        self.strangers[caller.host, why] += 1

    def dropped(self) -> str:
        """Name the strangers in a line; empty if there were none."""
        each = [f"{number} from {host} that {why}" for (host, why), number in sorted(self.strangers.items())]
        return f"dropped connections that are not of this run: {', '.join(each)}" if each else ""
