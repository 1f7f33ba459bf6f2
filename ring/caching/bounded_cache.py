"""A FIFO cache bounded by entries and bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that evicts its oldest entries while it has more than `most`, or more than `most_bytes` together. It never
    evicts the newest.

    Unlike with `functools.lru_cache`, a value may be computed from more than its key. Threads may share it.
    """

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        super().__init__()
        self._most, self._most_bytes, self._lock = most, most_bytes, threading.Lock()
        self._bytes: dict[K, int] = {}

    def get_or_make(self, key: K, make: Callable[[], V], nbytes: Callable[[V], int] | None = None) -> V:
        """Return the value of this key, or cache and return make(), which is never None. nbytes: approximate size of a
        value. Concurrent threads may each make one; the last is cached.
        """
        value = self.get(key)
        if value is None:
            value = make()
            value = self.put(key, value, 0 if nbytes is None else nbytes(value))
        return value

    def put(self, key: K, value: V, nbytes: int = 0) -> V:
        """Cache a value. nbytes: its approximate size."""
        with self._lock:
            self[key] = value
            if self._most_bytes is not None:
                self._bytes[key] = nbytes
            while len(self) > self._most or (len(self) > 1 and self._is_heavy()):
                oldest = next(iter(self))
                del self[oldest]
                self._bytes.pop(oldest, None)
        return value

    def clear(self) -> None:
        with self._lock:
            super().clear()
            self._bytes.clear()

    def _is_heavy(self) -> bool:
        return self._most_bytes is not None and sum(self._bytes.values()) > self._most_bytes
