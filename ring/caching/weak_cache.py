"""A cache whose entries live as long as the object they were computed from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def cached_on(make: Callable[..., T]) -> Callable[..., T]:
    """Cache `make` on its first argument, by identity and weakly, and on the other arguments. Results must not refer to
    the first argument.

    GPU tables of a plan's rows are cached like this: with documents every step has new plans, and an ordinary cache
    would fill the GPU with tables of dead ones.
    """
    caches: WeakKeyDictionary[Any, dict[tuple[Hashable, ...], T]] = WeakKeyDictionary()

    @wraps(make)
    def cached(owner: Any, *rest: Hashable) -> T:
        tables = caches.get(owner)
        if tables is None:
            tables = caches.setdefault(owner, {})
        if rest not in tables:
            tables[rest] = make(owner, *rest)
        return tables[rest]

    return cached
