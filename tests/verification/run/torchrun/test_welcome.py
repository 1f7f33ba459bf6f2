"""Strangers at the agents' port hold nobody up, and are named; agents are welcomed past them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from verification.run.torchrun import agents, welcome
from verification.run.torchrun.agents import Address
from verification.run.torchrun.welcome import Hello, Welcome, introduce

WORD = "0123456789abcdef" * 2
Connect = Callable[[], socket.socket]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield listening


@pytest.fixture
def connect(listener: socket.socket) -> Iterator[Connect]:
    with ExitStack() as open_sockets:
        yield lambda: open_sockets.enter_context(socket.create_connection(listener.getsockname()))


def agent(rank: int) -> Hello:
    return Hello(rank, 100 + rank, "here", 0, rank)


def call(connect: Connect, said: bytes, hang_up: bool = False) -> None:
    end = connect()
    end.sendall(said)
    if hang_up:
        end.close()


def come(connect: Connect, after: float) -> None:
    """Introduce both agents, rank 1 first."""
    time.sleep(after)
    for rank in (1, 0):
        introduce(connect().dup(), WORD, agent(rank)).send(f"rank {rank} is here")


@pytest.mark.parametrize(
    ("strangers", "named"),
    [
        ([(b"ab", False)], "1 from 127.0.0.1 that did not introduce itself"),
        ([(WORD.encode(), False)], "1 from 127.0.0.1 that did not introduce itself"),
        ([(b"x" * 40, False)] * 2, "2 from 127.0.0.1 that said another word"),
        ([(b"ab", True)], "1 from 127.0.0.1 that hung up"),
        ([(b"", False)] * 20, "that was one of too many"),
    ],
)
def test_agents_are_welcomed_past_strangers(
    listener: socket.socket, connect: Connect, strangers: list[tuple[bytes, bool]], named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(welcome, "MAX_CALLERS", 4)
    monkeypatch.setattr(welcome, "INTRODUCTION", 3600.0)  # a stranger that is waited for keeps the agents out
    for said, hang_up in strangers:
        call(connect, said, hang_up)
    coming = threading.Thread(target=come, args=(connect, 0.5))
    coming.start()
    guests = Welcome(listener, WORD.encode(), 2)
    guests.run(30.0)
    coming.join()
    assert {rank: hello for rank, (hello, _) in guests.agents.items()} == {0: agent(0), 1: agent(1)}
    assert [guests.agents[rank][1].recv() for rank in (0, 1)] == ["rank 0 is here", "rank 1 is here"]
    assert guests.dropped().startswith("dropped connections that are not of this run: ") and named in guests.dropped()
    for _, connection in guests.agents.values():
        connection.close()


def test_talking_strangers_do_not_move_the_deadline(
    listener: socket.socket, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(welcome, "INTRODUCTION", 0.3)
    over = threading.Event()

    def talk() -> None:
        while not over.wait(0.02):
            call(connect, b"a")

    talking = threading.Thread(target=talk)
    talking.start()
    guests = Welcome(listener, WORD.encode(), 1)
    guests.run(1.0)  # returns while they talk
    over.set()
    talking.join()
    assert not guests.agents
    assert "that did not introduce itself" in guests.dropped()


@pytest.mark.parametrize("one_host", [True, False])
def test_agents_refuse_other_users(one_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here, store = Address(0, 0, 1, "127.0.0.1", 9, served=True, one_host=one_host), HashStore()
    listener, word = agents.listen(here, store)
    assert listener.family == (socket.AF_UNIX if one_host else socket.AF_INET)
    other = os.geteuid() + 1
    with listener, monkeypatch.context() as as_other:
        stranger = socket.socket(listener.family)
        stranger.connect(listener.getsockname())
        as_other.setattr(os, "geteuid", lambda: other)
        if one_host:
            with pytest.raises(PermissionError, match="belongs to another user"):
                agents.connect(here, store)
        guests = Welcome(listener, word.encode(), 1)
        stranger.sendall(word.encode())  # the store has told it
        guests.run(0.2)
        assert not guests.agents
        assert ("2 from this host that belongs to another user" in guests.dropped()) == one_host
        as_other.undo()
        with stranger, agents.connect(here, store) as agent_end:
            guests.run(30.0)
            agent_end.send("here")
            ((_, connection),) = guests.agents.values()
            with connection:
                assert connection.recv() == "here"
