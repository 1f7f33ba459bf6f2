"""Which files are changed, and which unit tests see a change of each."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from verification.mutants.syntactic.mutations import ROOT, Mutation

FOLDER, PATTERN = "ring", "reference/pattern.py"
# These see every file of the ring at work in whole calls.
WHOLE_CALLS = ("tests/ring/test_attention_single.py", "tests/ring/test_attention_autograd.py")
ON_GPUS = Path(__file__).with_name("on_gpus.toml")


def files() -> list[str]:
    """Those that are changed: the ring's, as far as CPUs run them, and the pattern."""
    found = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / FOLDER).rglob("*.py")))
    return [file for file in (*found, PATTERN) if not file.endswith("__init__.py") and file not in files_on_gpus()]


def files_on_gpus() -> list[str]:
    """Only GPUs run these: no check on CPUs could tell a change of them."""
    return list(_on_gpus()["files"])


def functions_on_gpus() -> dict[str, list[str]]:
    """By file: likewise, functions, classes and methods (`Class.method`) of files that CPUs run in part."""
    return dict(_on_gpus()["functions"])


def runs_on_gpus_only(change: Mutation) -> bool:
    names = functions_on_gpus().get(change.file, ())
    return any(f"{change.function}.".startswith(f"{name}.") for name in names)


@cache
def _on_gpus() -> dict[str, Any]:
    return tomllib.loads(ON_GPUS.read_text())


def tests_of(file: str) -> list[str]:
    """The unit tests of a file in the order in which they run: of its own name, of its own folder, then whole calls.

    Of `tests/ring` or `tests/reference`, those that import a file of the top; of a folder further down, all of them.
    Of these files `run_tests` leaves out what starts processes.
    """
    folder = ROOT / "tests" / Path(file).parent
    module = file.removesuffix(".py").replace("/", ".")
    beside = [path for path in sorted(folder.rglob("test_*.py")) if module.count(".") > 1 or module in _imports(path)]
    beside.sort(key=lambda path: path.name != f"test_{Path(file).name}")
    whole = WHOLE_CALLS if file.startswith(FOLDER) else ()
    return list(dict.fromkeys((*(path.relative_to(ROOT).as_posix() for path in beside), *whole)))


def _imports(test: Path) -> set[str]:
    """What a test file imports: modules, and names from them with the module before them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
