"""The caches of this project's modules, and how to empty them: what they hold was computed in other
circumstances than those that are to be seen at work.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from ring.caching.bounded_cache import BoundedCache

_CACHES = (functools._lru_cache_wrapper, BoundedCache)
_WRAPPED = (staticmethod, classmethod)  # in a class's namespace, around the function


def clear_caches(packages: tuple[str, ...]) -> None:
    """Empty every functools cache, and every `BoundedCache`, in the modules of these packages that are imported."""
    for _, cache in _caches(packages):
        cache.clear() if isinstance(cache, BoundedCache) else cache.cache_clear()


def bounded_of(packages: tuple[str, ...]) -> list[tuple[str, BoundedCache[Any, Any]]]:
    """Every `BoundedCache`, by the name of its module."""
    return [(name, cache) for name, cache in _caches(packages) if isinstance(cache, BoundedCache)]


def recent_of(packages: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Every functools cache, by the name of its module and of its function."""
    return [(f"{n}.{x.__name__}", x) for n, x in _caches(packages) if not isinstance(x, BoundedCache)]


def _caches(packages: tuple[str, ...]) -> list[tuple[str, Any]]:
    inside = tuple(f"{package}." for package in packages)
    # One example in eleven asks for them, four times on each rank, and there are thousands of other modules.
    names = [name for name in list(sys.modules) if name.startswith(inside) or name in packages]
    modules = [module for name in names if (module := sys.modules.get(name)) is not None]
    return [(module.__name__, cache) for module in modules for cache in _caches_of(module)]


def _caches_of(module: types.ModuleType) -> list[Any]:
    """Those among the module's values, and among the members of the classes that it defines."""
    values = list(vars(module).values())
    classes = [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]
    members = [member for one in classes for member in list(vars(one).values())]
    values += [x.__func__ if isinstance(x, _WRAPPED) else x for x in members]
    return [value for value in values if isinstance(value, _CACHES)]
