"""Seeded defects: a few replacements of text in the source, a name, and where the like was seen."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]


class CannotPlant(Exception):
    """A defect that cannot be brought into the ranks' code: a fault of the tool, no verdict on what is verified."""


class BaselineFails(Exception):
    """Without any change an example or a test fails: nothing can be said of changes."""


@dataclass(frozen=True)
class Edit:
    """One replacement in a file of the project.

    file        its path from the root, as "ring/strided_view.py"
    function    the function, method or class whose text is edited, as "Accumulator.merge"; "" for the whole file
    was         a text that occurs in it exactly once: as little as that allows, so that the code around may change
    becomes     the text in its place
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
        """Return the source with the replacement. Raises CannotPlant where there is no place for it, or several."""
        lines = source.splitlines(keepends=True)
        first, last = _lines_of(ast.parse(source), self.function) if self.function else (1, len(lines))
        text = "".join(lines[first - 1 : last])
        times = text.count(self.was)
        if times != 1:
            where = f"{self.function} of {self.file}" if self.function else self.file
            raise CannotPlant(f"the text to replace stands {times} times, not once, in {where}: {self.was.strip()!r}")
        return "".join(lines[: first - 1]) + text.replace(self.was, self.becomes) + "".join(lines[last:])


def _lines_of(tree: ast.AST, name: str) -> tuple[int, int]:
    """First and last line of a function or class, decorators included. Raises CannotPlant if there is not just one."""
    nodes: list[ast.AST] = [tree]
    for part in name.split("."):
        nodes = [child for node in nodes for child in _definitions(node) if getattr(child, "name", "") == part]
    if len(nodes) != 1:
        raise CannotPlant(f"{name} is defined {len(nodes)} times, not once")
    (node,) = nodes
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.end_lineno is not None
    return min(line.lineno for line in (node, *node.decorator_list)), node.end_lineno


def _definitions(node: ast.AST) -> list[ast.AST]:
    """Functions and classes right within a node, also under an `if` or a `with`."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        found += [child] if is_definition else _definitions(child)
    return found


@dataclass(frozen=True)
class Defect:
    """One seeded defect.

    name        kebab-case, unique
    about       one sentence: what is wrong and what it does
    edits       all of them together are the defect
    provenance  where the like was seen, as project#number or by name; "own": thought of here
    listed      its numbers in the project's list of defect classes that were seen in public ring-attention code, which
                the catalogue and `NO_PLACE` cover together
    backend     "gloo" where the broken code runs on real process groups only
    subject     what is drawn to find it: "attention", Cases and laws; "training", TrainingCases; "faults", Cases with a
                fault that is struck into a rank. The last two are on "gloo" always
    """

    name: str
    about: str
    edits: tuple[Edit, ...]
    provenance: str = "own"
    listed: tuple[int, ...] = ()
    backend: Literal["sim", "gloo"] = "sim"
    subject: Literal["attention", "training", "faults"] = "attention"

    @property
    def place(self) -> tuple[str, str]:
        """(subject, backend)."""
        return self.subject, self.backend if self.subject == "attention" else "gloo"

    @property
    def in_oracle(self) -> bool:
        """Whether the process that judges runs the edited code as well: ranks and oracle share it."""
        return any(edit.file.startswith("reference/") for edit in self.edits)

    def sources(self) -> dict[str, str]:
        """Return the edited source of every module concerned, by the module's name.

        Raises CannotPlant where a text to replace is not there exactly once, or where the edits of a file make no
        program or the same one.
        """
        found: dict[str, str] = {}
        for edit in self.edits:
            try:
                found[edit.module] = edit.applied(found.get(edit.module) or edit.path.read_text())
            except (CannotPlant, SyntaxError) as error:
                raise CannotPlant(f"{self.name}: {error}") from error
        if not found:
            raise CannotPlant(f"{self.name}: there is nothing to edit")
        for edit in self.edits:
            self._check(edit, found)
        return found

    def _check(self, edit: Edit, sources: Mapping[str, str]) -> None:
        """Raises CannotPlant."""
        try:
            after = ast.parse(sources[edit.module])
        except SyntaxError as error:
            raise CannotPlant(f"{self.name}: the edited {edit.file} does not compile: {error}") from error
        if ast.dump(after) == ast.dump(ast.parse(edit.path.read_text())):
            raise CannotPlant(f"{self.name}: the edited {edit.file} says the same as before")
