"""Names that changed code uses and nobody binds: it fails on its first use, which would look like a defect found."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import types
from collections.abc import Iterator
from typing import Any


def unbound(source: str, code: types.CodeType, namespace: dict[str, Any]) -> list[str]:
    """Global names, attributes of modules, and imports inside functions that are not there.

    source, code: of a module, whose names `namespace` has once it was run.
    """
    return sorted({*_globals(code, namespace), *_imports(ast.parse(source), namespace["__package__"])})


def _globals(code: types.CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    found: Any = None  # the module that the instruction before has loaded
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            if step.argval not in namespace and not hasattr(builtins, step.argval):
                yield step.argval
            found = namespace.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(found, types.ModuleType):
            if not hasattr(found, step.argval):
                yield f"{found.__name__}.{step.argval}"
            found = getattr(found, step.argval, None)
        else:
            found = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant, namespace)


def _imports(tree: ast.Module, package: str | None) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _imported(alias.name, package) is None)
        elif isinstance(node, ast.ImportFrom):
            whence = "." * node.level + (node.module or "")
            module = _imported(whence, package)
            for alias in node.names:
                if module is None or not (hasattr(module, alias.name) or _imported(f"{whence}.{alias.name}", package)):
                    yield f"{whence}.{alias.name}"


def _imported(name: str, package: str | None) -> types.ModuleType | None:
    try:
        return importlib.import_module(name, package)
    except ImportError:
        return None
