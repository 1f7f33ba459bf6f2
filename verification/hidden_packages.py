"""A user's module that Python imports in place of a package of this project, since it has the same name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def hidden() -> str | None:
    """Return a line that says which file hides `reference` or `ring`; None if none does."""
    for name in ("reference", "ring"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).parents[1] != Path(__file__).parents[1]:
            return f"{spec.origin} hides the package {name}, which is needed: rename it, or run this in another folder"
    return None
