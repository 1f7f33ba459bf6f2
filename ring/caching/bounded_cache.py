"""A dict for what is settled once for a setting, which forgets the oldest settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """`get` finds what was kept; `put` keeps it, and forgets what came first if there are more than `most` entries, or
    if together they take more than `most_bytes`. The newest stays in any case. `get_or_make` makes what is not there.

    Unlike `functools.lru_cache`, it can keep what was made of more than the key. Ranks may be threads of one process.
    """

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        super().__init__()
        self._most, self._most_bytes, self._lock = most, most_bytes, threading.Lock()
        self._bytes: dict[K, int] = {}

    def get_or_make(self, key: K, make: Callable[[], V], nbytes: Callable[[V], int] | None = None) -> V:
        """What is kept by this key, or what `make` returns, which is then kept; it is not None. nbytes: of that, about
        what it takes. Threads that ask at the same time may each make one; the last is kept.
        """
        found = self.get(key)
        if found is None:
            made = make()
            found = self.put(key, made, 0 if nbytes is None else nbytes(made))
        return found

    def put(self, key: K, value: V, nbytes: int = 0) -> V:
        """nbytes: about what the value takes."""
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
