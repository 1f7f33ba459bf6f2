"""Changed source in place of a module's own, in the process of a rank.

A module that was imported cannot simply be replaced: others hold its functions by `from` imports, in caches, in
closures. So a rank forgets the modules of the project before its first task, and imports them again when they are
needed next, the changed ones from the changed text. This is the same as edited files in a new process, without the
seconds that torch takes to import.
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
# These stay as they are: the rank is in a function of the worker, which has joined it to its process group and knows
# failures by their types. None of them uses `ring`.
KEPT = (failures, rendezvous, worker)
# Of private memory, beyond what a rank has when the changed source comes, in bytes: a loop that fills memory ends here.
# Address space would be no measure: torch's build for GPUs reserves much of it, and where it cannot, looks for GPUs
# again and again.
MEMORY = 3 * 2**30


def preparation(defect: Defect) -> Callable[[], None]:
    """What ranks are prepared with to run with this defect, for good. Raises CannotPlant where it has no source.

    In a rank it raises CannotPlant if an edited module cannot be imported.
    """
    return partial(plant, defect.name, defect.sources())


def plant(name: str, sources: Mapping[str, str], memory: int | None = MEMORY) -> None:
    """In this process, for good: `sources`, by the module's name. Raises CannotPlant."""
    substitute(sources, memory)
    for module in sources:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise CannotPlant(f"{name}: the edited {module} does not run: {error!r}") from error


def substitute(sources: Mapping[str, str], memory: int | None = MEMORY) -> None:
    """Forget the project's modules: they are imported anew when they are needed, these from the text given here.

    sources: by the module's name. Nothing is imported here: a source that does not even import fails in the next call
    of the rank. memory: in bytes, what the process may take from now on; None for no limit, which the processes that
    it starts could not lower again. Raises ValueError for a module that does not exist.
    """
    unknown = [name for name in sources if importlib.util.find_spec(name) is None]
    if unknown:
        raise ValueError(f"sources must be of modules of the project, got {', '.join(unknown)}")
    # A graph keeps operators that are told to have side effects: the changed modules are to say it themselves.
    marked = torch.fx.node._side_effectful_functions
    marked -= {one for one in marked if str(one).startswith("ring.")}
    sys.meta_path.insert(0, _Finder(sources))
    kept = {module.__name__ for module in KEPT}
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES and name not in kept]:
        # Operators that a module has made stay with torch when it is forgotten: its successor would find them there.
        for library in [x for x in vars(sys.modules.pop(name)).values() if isinstance(x, torch.library.Library)]:
            library._destroy()
    if memory is not None:
        # Private memory, in pages: what RLIMIT_DATA limits (Linux 4.7).
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have another source than their file."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._sources:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert found is not None and found.origin is not None
        found.loader = _Loader(fullname, found.origin, self._sources[fullname])
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    """The module's file with another content."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._source, self.path, "exec")
