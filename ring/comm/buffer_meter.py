"""How many bytes of communication buffers calls hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ring.comm.transport import Transport


@dataclass(eq=False)
class Measure:
    """Bytes of communication buffers: held now, and at most so far."""

    transport: Transport | None
    held: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.held += size
        self.bytes = max(self.bytes, self.held)


_measures: list[Measure] = []


@contextmanager
def measure(transport: Transport | None = None) -> Iterator[Measure]:
    """Count the communication buffers that calls inside allocate; `.bytes` is the peak.

    transport: count those of calls over it; None: those of the whole process. It does not go by thread, since ranks
    may be threads of one process, and autograd runs a backward on GPUs in threads of its own.
    """
    found = Measure(transport)
    _measures.append(found)
    try:
        yield found
    finally:
        _measures.remove(found)


def count(transport: Transport, size: int) -> None:
    """A call over this transport allocated so many bytes, or freed them if negative."""
    for found in _measures:
        if found.transport in (None, transport):
            found.add(size)


def measuring() -> bool:
    """Whether anybody measures."""
    return bool(_measures)
