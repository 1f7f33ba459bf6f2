"""Meters for the bytes of communication buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ring.comm.transport import SomeRanks, Transport


@dataclass(eq=False)
class Measure:
    """Bytes of communication buffers. held: now; bytes: the peak so far."""

    transport: Transport | None
    held: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.held += size
        self.bytes = max(self.bytes, self.held)


_meters: list[Measure] = []


@contextmanager
def measure(transport: Transport | None = None) -> Iterator[Measure]:
    """Count the communication buffers that calls inside allocate; `.bytes` is the peak.

    transport: count calls over it only; None: of the whole process. Threads would be no criterion: autograd runs a
    backward on GPUs in threads of its own.
    """
    meter = Measure(transport)
    _meters.append(meter)
    try:
        yield meter
    finally:
        _meters.remove(meter)


def count(transport: Transport, size: int) -> None:
    """Record that a call over this transport allocated `size` bytes, or freed them if negative."""
    if isinstance(transport, SomeRanks):
        transport = transport.whole
    for meter in _meters:
        if meter.transport in (None, transport):
            meter.add(size)


def measuring() -> bool:
    """Return True inside a `measure`."""
    return bool(_meters)
