"""Counts of kernel calls, by kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counters: list[Counter[str]] = []


@contextmanager
def count_kernels() -> Iterator[Counter[str]]:
    """Return a context manager that counts kernel calls by name: the choices of "auto".

        with ring.count_kernels() as count:
            ring_attention(q, k, v, pattern, layout)
        assert set(count) <= {"flash", "cudnn"}

    Its target is the `Counter`.
    """
    calls: Counter[str] = Counter()
    _counters.append(calls)
    try:
        yield calls
    finally:
        _counters[:] = [counter for counter in _counters if counter is not calls]


def count(name: str) -> None:
    """Count a call of the kernel `name`."""
    for counter in _counters:
        counter[name] += 1


def counting() -> bool:
    """Return True if calls are being counted."""
    return bool(_counters)
