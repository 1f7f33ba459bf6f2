"""The form `package.module:attribute` in which a user names an adapter or a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def suggested(name: str, example: str) -> str | None:
    """Return what to write in place of a name of another form: `my.module:attribute`; None for no name of a module.

    Args:
        name: as a user typed it: `my.module.attribute`, `my/module.py`, `my/module.py:attribute`.
        example: an attribute to suggest if the name has none.
    """
    path, _, attribute = name.partition(":")
    module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
    if not all(part.isidentifier() for part in module.split(".")) or not (attribute or example).isidentifier():
        return None
    parent, _, last = module.rpartition(".")
    dotted = "/" not in path and not path.endswith(".py")
    if not attribute and parent and not _is_module(module) and (dotted or _is_module(parent)):
        module, attribute = parent, last
    return f"{module}:{attribute or example}"


def _is_module(module: str) -> bool:
    """Return True if a folder of the path has its file. Nothing is imported: that may hang, or do anything."""
    files = [Path(folder or os.curdir, *module.split(".")) for folder in (os.getcwd(), *sys.path)]
    return any(file.with_suffix(".py").is_file() or file.is_dir() for file in files)
