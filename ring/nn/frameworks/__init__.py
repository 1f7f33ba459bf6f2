"""Former names of the modules of `ring.integrations`: each can be imported here, with a warning of its new name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "ddp": "wrappers.ddp", "fsdp": "wrappers.fsdp", "mesh": "wrappers.mesh", "recompute": "wrappers.recompute",
    "transformers": "transformers", "trainer": "trainers.trainer", "lightning": "trainers.lightning",
    "deepspeed": "deepspeed", "fairscale": "fairscale", "parallel_style": "parallel_style",
    # named in the pickles of whole prepared models
    "transformers_call": "transformers.call", "transformers_temperature": "transformers.temperature",
}  # fmt: skip


class _Moved(MetaPathFinder, Loader):
    """Imports the module of the new name in place of the old one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __name__ and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = f"ring.integrations.{MOVED[module.__name__.rpartition('.')[2]]}"
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


sys.meta_path.append(_Moved())
