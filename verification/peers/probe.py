"""Whether a peer can be run, found out in a process of its own: an import may hang or abort."""

from __future__ import annotations

from verification.failures import RankFailure
from verification.peers.peer import Refused, ready
from verification.run.backends import PRELOAD, Unavailable
from verification.run.processes.pool import Pool, PoolError

TIMEOUT = 120.0  # seconds: a first import may have to compile


def probe(spec: str, timeout: float = TIMEOUT) -> None:
    """Raises Refused where the peer, or what it needs, cannot be imported; Unavailable where no process starts."""
    try:
        with Pool(1, timeout=timeout, preload=PRELOAD) as pool:
            (reason,) = pool.run(refusal, spec)
    except PoolError as error:
        raise Unavailable(f"no process to import {spec} in could be started: {error}") from error
    except RankFailure as failure:
        raise Refused(f"importing {spec} failed: {failure.headline}") from failure
    if reason is not None:
        raise Refused(reason)


def refusal(spec: str) -> str | None:
    """Called in the process: why the peer cannot be run; None if it can."""
    try:
        ready(spec)
    except Refused as error:
        return str(error)
    return None
