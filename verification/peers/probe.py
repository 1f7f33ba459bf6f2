"""Checks in a separate process that a peer can be run, since an import may hang or abort."""

from __future__ import annotations

from collections.abc import Callable

from verification.failures import RankFailure
from verification.peers.known_peers import ready
from verification.peers.peer import Refused
from verification.run.backends import PRELOAD, Unavailable
from verification.run.processes.pool import Pool, PoolError

TIMEOUT = 120.0  # seconds: the first import may compile


def probe(name: str, timeout: float = TIMEOUT, ready: Callable[[str], object] = ready) -> None:
    """Import the peer in a new process. Raises Refused if it or its requirements cannot be imported, Unavailable if no
    process starts. ready: finds the peer of that name and does its imports."""
    try:
        with Pool(1, timeout=timeout, preload=PRELOAD) as pool:
            (reason,) = pool.run(refusal, name, ready)
    except PoolError as error:
        raise Unavailable(f"no process to import {name} in could be started: {error}") from error
    except RankFailure as failure:
        raise Refused(f"importing {name} failed: {failure.headline}") from failure
    if reason is not None:
        raise Refused(reason)


def refusal(name: str, ready: Callable[[str], object]) -> str | None:
    """Task: return the reason why the peer cannot be run; None if it can."""
    try:
        ready(name)
    except Refused as error:
        return str(error)
    return None
