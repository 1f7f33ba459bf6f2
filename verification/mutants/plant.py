"""Replaces the source of modules in the process of a rank.

An imported module cannot simply be replaced: others hold its functions by `from` imports, in caches, in closures. So a
rank drops the project's modules before its first task, and imports them again on demand, the edited ones from the
edited text. The effect is that of edited files in a new process, without the seconds that importing torch takes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from verification import failures
from verification.mutants.defect import CannotPlant, Defect
from verification.run.processes import rendezvous, worker

PACKAGES = ("reference", "ring", "verification")
# Modules that stay: the rank runs in a function of the worker, which has joined the process group and compares types of
# failures. None of them uses `ring`.
NOT_DROPPED = (failures, rendezvous, worker)
# Limit of private memory, in bytes, in addition to that of the rank at the time: it ends a loop that fills memory.
# Address space cannot be limited: torch's GPU build reserves much of it and, if that fails, probes for GPUs again and
# again.
MEMORY = 3 * 2**30


def preparation(defect: Defect) -> Callable[[], None]:
    """Return a function that plants this defect in a rank for good. Raises CannotPlant if it does not fit the source.

    In a rank the function raises CannotPlant if an edited module cannot be imported.
    """
    return partial(plant, defect.name, defect.sources())


def plant(name: str, sources: Mapping[str, str], memory: int | None = MEMORY) -> None:
    """Plant `sources` (by module name) in this process, permanently. Raises CannotPlant."""
    substitute(sources, memory)
    for module in sources:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise CannotPlant(f"{name}: the edited {module} does not run: {error!r}") from error


def substitute(sources: Mapping[str, str], memory: int | None = MEMORY) -> None:
    """Drop the project's modules: they are imported again on demand, those of `sources` (by name) from its text.

    Nothing is imported here: a source that cannot be imported fails in the next call of the rank. memory: additional
    private bytes that the process may allocate; None: no limit. Child processes inherit a limit and cannot change it.
    Raises ValueError for an unknown module.
    """
    unknown = [name for name in sources if importlib.util.find_spec(name) is None]
    if unknown:
        raise ValueError(f"sources must be of modules of the project, got {', '.join(unknown)}")
    # Graphs keep operators that are marked as having side effects: the edited modules must mark theirs again.
    marked = torch.fx.node._side_effectful_functions
    marked -= {operator for operator in marked if str(operator).startswith("ring.")}
    sys.meta_path.insert(0, _Finder(sources))
    remaining = {module.__name__ for module in NOT_DROPPED}
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES and name not in remaining]:
        # Operators of a dropped module stay registered with torch, and would clash with those of its successor.
        for library in [x for x in vars(sys.modules.pop(name)).values() if isinstance(x, torch.library.Library)]:
            library._destroy()
    if memory is not None:
        # Private memory in pages, which RLIMIT_DATA limits (Linux 4.7).
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules with edited source."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._sources:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._sources[fullname])
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module's file with edited content."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._source, self.path, "exec")
