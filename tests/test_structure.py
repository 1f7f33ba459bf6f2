"""The folders are the road: no import runs back along it, and none in a circle.

Imports count wherever they stand, inside functions and under TYPE_CHECKING too.
"""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ring.compute.kernels import NAMES

ROOT = Path(__file__).parents[1]
PACKAGES = ("reference", "ring", "verification")

# The stops in order. A module belongs to the stop with the longest matching name, and imports from its own and earlier
# stops only.
ROAD = (
    "reference",
    "ring.regular_file", "ring.extras",
    "ring.caching", "ring.precision", "ring.balance", "ring.layout_picture", "ring.layout", "ring.plan",
    "ring.adjacent", "ring.strided_view", "ring.comm", "ring.compute",
    "ring.lowering", "ring.default_bucket", "ring.settings", "ring.validation", "ring.programs",
    "ring.consensus", "ring.attend", "ring.attend_parts", "ring.execute", "ring.dispatcher_op",
    "ring.torch_compile", "ring.attention",
    "ring.nn", "ring.estimate", "ring", "ring.integrations",
    "verification.hidden_packages", "verification.wording", "verification.console", "verification.whole_file",
    "verification.failures",
    "verification.protocols", "verification.saved_fields", "verification.record_kinds", "verification.case",
    "verification.case_line", "verification.strategies", "verification.run", "verification.check",
    "verification.causes", "verification.search",
    "verification.experiments", "verification.report", "verification.problems", "verification.runner",
    "verification.whole_run", "verification.faults", "verification.models", "verification.training",
    "verification.mutants", "verification.peers", "verification.serving", "verification.replay", "verification.testing",
    "verification.pytest_plugin", "verification.cli", "verification.__main__",
)  # fmt: skip
NO_BEGINNINGS = (
    "As", "By", "How", "Likewise", "Of", "That", "Their", "Those", "What", "Where", "Whether", "Which", "Who", "Whom",
    "Whose",
)  # fmt: skip
# Test names say what holds, in a phrase: not what somebody does, nor a riddle.
NO_TEST_NAMES = re.compile(
    r"test_(a_thing|as|how|it|nothing|of|that|their|things|those|what|where|whether|which|who|whom|whose)(_|$)"
)
LONGEST_TEST_NAME = 60


@cache
def files() -> dict[str, Path]:
    """Every module by its dotted name; a package by its own."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The project's modules that a module imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(files()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= set(files()) else {*names, node.module}
    return frozenset(found & set(files()) - {module})


def stop(module: str) -> int:
    """The number of the module's stop; a package that is itself a stop is after all that it holds."""
    fitting = [name for name in ROAD if module == name or (name != "ring" and module.startswith(f"{name}."))]
    assert fitting, f"{module} has no place on the road: give it one in {Path(__file__).name}"
    return ROAD.index(max(fitting, key=len))


@pytest.mark.parametrize("module", [name for name in files() if name != "verification"])
def test_no_import_runs_back(module: str) -> None:
    # `exchange="auto"` alone asks the road's end, where estimates are: calls with a name never import them.
    above = {"ring.estimate.choice"} if module == "ring.consensus" else set()
    back = [other for other in imports(module) - above if stop(other) > stop(module)]
    assert not back, f"{module} imports {', '.join(back)}, which come later on the road"


def test_no_import_runs_in_a_circle() -> None:
    try:
        TopologicalSorter({module: imports(module) for module in files()}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_ring_imports_only_patterns_and_pictures_of_reference() -> None:
    shared = {f"reference.{name}" for name in ("pattern", "slices", "mask_converters", "documents", "svg")}
    for module in files():
        if module.startswith("ring"):
            # Estimates have arguments of their own, which are refused in the words of those of the reference.
            allowed = shared | ({"reference.validators"} if module.startswith("ring.estimate") else set())
            assert all(other.startswith("ring") or other in allowed for other in imports(module)), module
    assert all(x.startswith("reference") or x == "verification.saved_fields" for x in imports("verification.case"))


def test_exchanges_are_named_in_one_place() -> None:
    """Below `ring.plan.exchange`, where names are parsed, code asks records and compares no strings."""
    names, elsewhere = (
        {"ring", "direct", "gather", "all-to-all"},
        {("ring.nn", "gather"), ("ring.nn.sequence", "gather")},
    )
    compares = (ast.Compare, ast.Dict, ast.Tuple, ast.List, ast.Set, ast.match_case)
    compared = {
        (module, side.value)
        for module, path in files().items()
        if module.startswith("ring") and not module.startswith("ring.plan.exchange")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, compares)
        for side in ast.walk(node)
        if isinstance(side, ast.Constant) and isinstance(side.value, str) and side.value in names
    }
    assert compared <= elsewhere  # there it is an operation


def test_only_kernels_know_their_names() -> None:
    """Everything else in `ring` asks a kernel's record: facts of one kernel stand in its file."""
    written = []
    for module, path in files().items():
        if module.startswith("ring") and not module.startswith(("ring.compute.kernels", "ring.extras")):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            named = [node for node in nodes if node.value in NAMES[1:] and isinstance(node.value, str)]
            written += [f"{module}, line {node.lineno}: {node.value!r}" for node in named]
    assert written == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    refused = []
    for path in [path for folder in (*PACKAGES, "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            docstring = ast.get_docstring(node) if isinstance(node, documented) else None
            if docstring and docstring.split()[0].strip("`,:") in NO_BEGINNINGS:
                line = getattr(node, "lineno", 1)
                refused.append(f"{path.relative_to(ROOT)}, line {line}: {docstring.splitlines()[0]}")
    assert refused == []


def test_test_names_are_short_and_say_what_holds() -> None:
    refused = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if len(node.name) > LONGEST_TEST_NAME or NO_TEST_NAMES.match(node.name)
    ]
    assert refused == []
