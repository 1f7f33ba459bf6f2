"""A dict for what is settled once for a setting, which forgets the oldest settings."""

from __future__ import annotations

import threading
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """`get` finds what was kept; `keep` keeps it, and forgets what came first if there are more than `most` entries.

    Unlike `functools.lru_cache`, it can keep what was made of more than the key. Ranks may be threads of one process.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def keep(self, key: K, value: V) -> V:
        with self._lock:
            self[key] = value
            while len(self) > self._most:
                del self[next(iter(self))]
        return value
