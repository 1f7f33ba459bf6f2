"""A user's module that Python imports in place of a package that is needed, since it has the same name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def hidden() -> str | None:
    """Return a line that says which file hides a package; None if none does."""
    for name in ("reference", "ring", "hypothesis", "numpy", "torch"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        ours = name in ("reference", "ring") and Path(spec.origin).parents[1] != Path(__file__).parents[1]
        if ours or spec.submodule_search_locations is None:  # a module, where a package is needed
            return f"{spec.origin} hides the package {name}, which is needed: rename it, or run this in another folder"
    return None
