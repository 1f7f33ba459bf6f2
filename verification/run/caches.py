"""The caches of this project's modules, and how to empty them: what they hold was computed in other
circumstances than those that are to be seen at work.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from ring.caching.bounded import Bounded


def clear_caches(packages: tuple[str, ...]) -> None:
    """Empty every functools cache, and every `Bounded`, in the modules of these packages that are imported."""
    for module in modules_of(packages):
        for value in _members(module):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
            elif isinstance(value, Bounded):
                value.clear()


def modules_of(packages: tuple[str, ...]) -> list[types.ModuleType]:
    """The imported modules of these packages."""
    return [m for name, m in list(sys.modules.items()) if m is not None and name.partition(".")[0] in packages]


def _members(module: types.ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        yield value
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield from (getattr(member, "__func__", member) for member in list(vars(value).values()))
