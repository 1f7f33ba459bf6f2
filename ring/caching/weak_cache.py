"""What is computed from an object and kept beside it: it is there as long as the object is, and no longer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def cached_on(make: Callable[..., T]) -> Callable[..., T]:
    """`make`, whose first argument is told apart by identity and need not be hashed by value: what it returns is made
    once for it and the other arguments. What it returns must not refer to the first argument.

    Tables on a GPU are made so from rows of a plan: with documents every step has plans of its own, and a cache of so
    many tables would fill the GPU with those of plans that are gone.
    """
    found: WeakKeyDictionary[Any, dict[tuple[Hashable, ...], T]] = WeakKeyDictionary()

    @wraps(make)
    def kept(of: Any, *rest: Hashable) -> T:
        tables = found.get(of)
        if tables is None:
            tables = found.setdefault(of, {})
        if rest not in tables:
            tables[rest] = make(of, *rest)
        return tables[rest]

    return kept
