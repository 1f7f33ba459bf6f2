"""Names that changed code uses and nobody binds: it fails on its first use, which would look like a defect found."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path
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
            yield from (alias.name for alias in node.names if not _is_there(alias.name, package))
        elif isinstance(node, ast.ImportFrom):
            whence = "." * node.level + (node.module or "")
            names = _names(whence, package)
            for alias in node.names:
                if alias.name not in names and not _is_there(f"{whence}.{alias.name}", package):
                    yield f"{whence}.{alias.name}"


def _is_there(name: str, package: str | None) -> bool:
    try:
        return importlib.util.find_spec(name, package) is not None
    except ImportError:
        return False


def _names(name: str, package: str | None) -> set[str]:
    """What a module binds: read off its text where it needs what is not installed here, as modules for GPUs do."""
    if not _is_there(name, package):
        return set()
    try:
        return set(dir(importlib.import_module(name, package)))
    except ImportError:
        spec = importlib.util.find_spec(name, package)
        text = Path(spec.origin).read_text() if spec is not None and spec.origin is not None else ""
        kinds = (ast.FunctionDef, ast.ClassDef)
        return {node.name for node in ast.parse(text).body if isinstance(node, kinds)}
