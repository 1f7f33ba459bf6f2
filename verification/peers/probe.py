"""Finds out in a separate process whether a peer can be run, since an import may hang or abort."""

from __future__ import annotations

from collections.abc import Callable

from verification.failures import RankFailure
from verification.peers.known_peers import ready
from verification.peers.peer import Refused
from verification.run.backends import PRELOAD, Unavailable
from verification.run.processes.pool import Pool, PoolError

TIMEOUT = 120.0  # seconds: a first import may have to compile


def probe(name: str, timeout: float = TIMEOUT, ready: Callable[[str], object] = ready) -> None:
    """Raises Refused where the peer, or what it needs, cannot be imported; Unavailable where no process starts. ready:
    what finds the peer of that name, and has it import what it needs."""
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
    """Called in that process: the reason why the peer cannot be run; None if it can."""
    try:
        ready(name)
    except Refused as error:
        return str(error)
    return None
