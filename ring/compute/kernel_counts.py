"""Which kernels calls take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_counters: list[Counter[str]] = []


@contextmanager
def count_kernels() -> Iterator[Counter[str]]:
    """Count the kernel calls made inside by name: what "auto" picked. `ring.count_kernels` is this one.

    with ring.count_kernels() as count:
        ring_attention(q, k, v, pattern, layout)
    assert set(count) <= {"flash", "cudnn"}
    """
    found: Counter[str] = Counter()
    _counters.append(found)
    try:
        yield found
    finally:
        _counters[:] = [counter for counter in _counters if counter is not found]


def count(name: str) -> None:
    """A kernel of that name is called."""
    for counter in _counters:
        counter[name] += 1


def counting() -> bool:
    """Whether anybody counts."""
    return bool(_counters)
