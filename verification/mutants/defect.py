"""Seeded defects: a few text replacements in the source, with a name and a provenance."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]


class CannotPlant(Exception):
    """A defect cannot be planted into the ranks' code: a fault of the tool, not a verdict."""


class BaselineFails(Exception):
    """An example fails without any defect, so that defects cannot be judged."""


@dataclass(frozen=True)
class Edit:
    """One replacement in a file of the project.

    file        its path from the root, as "ring/strided_view.py"
    function    the function, method or class whose text is edited, as "Accumulator.merge"; "" for the whole file
    was         a text that occurs in it exactly once; keep it short, so that the code around it may change
    becomes     its replacement
    """

    file: str
    was: str
    becomes: str
    function: str = ""

    @property
    def path(self) -> Path:
        return ROOT / self.file

    @property
    def module(self) -> str:
        """Name by which the file is imported."""
        return self.file.removesuffix(".py").replace("/", ".")

    def applied(self, source: str) -> str:
        """Return the source with the replacement. Raises CannotPlant unless `was` occurs exactly once."""
        lines = source.splitlines(keepends=True)
        first, last = _find_lines(ast.parse(source), self.function) if self.function else (1, len(lines))
        text = "".join(lines[first - 1 : last])
        times = text.count(self.was)
        if times != 1:
            where = f"{self.function} of {self.file}" if self.function else self.file
            raise CannotPlant(f"the text to replace stands {times} times, not once, in {where}: {self.was.strip()!r}")
        return "".join(lines[: first - 1]) + text.replace(self.was, self.becomes) + "".join(lines[last:])


def _find_lines(tree: ast.AST, name: str) -> tuple[int, int]:
    """Return first and last line of a function or class, with decorators. Raises CannotPlant unless there is one."""
    nodes: list[ast.AST] = [tree]
    for part in name.split("."):
        nodes = [child for node in nodes for child in _definitions(node) if getattr(child, "name", "") == part]
    if len(nodes) != 1:
        raise CannotPlant(f"{name} is defined {len(nodes)} times, not once")
    (node,) = nodes
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.end_lineno is not None
    return min(line.lineno for line in (node, *node.decorator_list)), node.end_lineno


def _definitions(node: ast.AST) -> list[ast.AST]:
    """Return the functions and classes directly within a node, also under an `if` or a `with`."""
    definitions: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        definitions += [child] if is_definition else _definitions(child)
    return definitions


@dataclass(frozen=True)
class Defect:
    """One seeded defect.

    name        kebab-case, unique
    about       the bug and its effect, in one sentence
    edits       the replacements, which together make the defect
    provenance  public source, as project#number or a name; "own" without one
    listed      numbers of the classes of defects seen in public ring-attention code that it stands for; the
                catalogue and `NO_PLACE` cover all classes
    backend     "gloo" if the broken code runs on real process groups only
    subject     the examples that search for it: "attention", Cases and laws; "training", TrainingCases; "same weights",
                these on other ranks, too; "faults", Cases with a fault injected into a rank. All but the first always
                run on "gloo"
    """

    name: str
    about: str
    edits: tuple[Edit, ...]
    provenance: str = "own"
    listed: tuple[int, ...] = ()
    backend: Literal["sim", "gloo"] = "sim"
    subject: Literal["attention", "training", "same weights", "faults"] = "attention"

    @property
    def setting(self) -> tuple[str, str]:
        """(subject, backend)."""
        return self.subject, self.backend if self.subject == "attention" else "gloo"

    @property
    def in_oracle(self) -> bool:
        """True if the oracle runs the edited code as well as the ranks."""
        return any(edit.file.startswith("reference/") for edit in self.edits)

    def sources(self) -> dict[str, str]:
        """Return the edited source of every module concerned, by the module's name.

        Raises CannotPlant if a text to replace does not occur exactly once, or if an edited file does not compile or
        parses to the same program.
        """
        sources: dict[str, str] = {}
        for edit in self.edits:
            try:
                sources[edit.module] = edit.applied(sources.get(edit.module) or edit.path.read_text())
            except (CannotPlant, SyntaxError) as error:
                raise CannotPlant(f"{self.name}: {error}") from error
        if not sources:
            raise CannotPlant(f"{self.name}: there is nothing to edit")
        for edit in self.edits:
            self._check(edit, sources)
        return sources

    def _check(self, edit: Edit, sources: Mapping[str, str]) -> None:
        """Check that an edited file compiles and has changed. Raises CannotPlant."""
        try:
            after = ast.parse(sources[edit.module])
        except SyntaxError as error:
            raise CannotPlant(f"{self.name}: the edited {edit.file} does not compile: {error}") from error
        if ast.dump(after) == ast.dump(ast.parse(edit.path.read_text())):
            raise CannotPlant(f"{self.name}: the edited {edit.file} says the same as before")
