"""The caches of this project's modules, and how to empty them before a run that must compute everything again."""

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


def bounded_caches(packages: tuple[str, ...]) -> list[tuple[str, BoundedCache[Any, Any]]]:
    """Return every `BoundedCache` with the name of its module."""
    return [(name, cache) for name, cache in _caches(packages) if isinstance(cache, BoundedCache)]


def lru_caches(packages: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return every functools cache with the name of its module and function."""
    return [(f"{n}.{x.__name__}", x) for n, x in _caches(packages) if not isinstance(x, BoundedCache)]


def _caches(packages: tuple[str, ...]) -> list[tuple[str, Any]]:
    inside = tuple(f"{package}." for package in packages)
    # Filter by name first: this runs four times per rank in one example of eleven, among thousands of modules.
    names = [name for name in list(sys.modules) if name.startswith(inside) or name in packages]
    modules = [module for name in names if (module := sys.modules.get(name)) is not None]
    return [(module.__name__, cache) for module in modules for cache in _find_caches(module)]


def _find_caches(module: types.ModuleType) -> list[Any]:
    """Return the caches among the module's values and the members of its classes."""
    values = list(vars(module).values())
    classes = [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]
    members = [member for cls in classes for member in list(vars(cls).values())]
    values += [x.__func__ if isinstance(x, _WRAPPED) else x for x in members]
    return [value for value in values if isinstance(value, _CACHES)]
