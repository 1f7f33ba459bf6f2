"""What a seeded defect is: a few replacements of text in the source, a name, and where the like was seen."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]


class CannotPlant(Exception):
    """A defect that cannot be brought into the ranks' code: a fault of the tool, no verdict on what is verified."""


class NotSane(Exception):
    """Without any change an example or a test fails: nothing can be said of changes."""


@dataclass(frozen=True)
class Edit:
    """One replacement in a file of the project, as "ring/strided_view.py". `was` occurs there exactly once."""

    file: str
    was: str
    becomes: str

    @property
    def path(self) -> Path:
        return ROOT / self.file

    @property
    def module(self) -> str:
        """The name by which the file is imported."""
        return self.file.removesuffix(".py").replace("/", ".")


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
        """The edited source of every module concerned, by the module's name.

        Raises CannotPlant where a text to replace is not there exactly once, or where the edits of a file make no
        program or the same one.
        """
        found: dict[str, str] = {}
        for edit in self.edits:
            before = found.get(edit.module) or edit.path.read_text()
            times = before.count(edit.was)
            if times != 1:
                raise CannotPlant(f"{self.name}: the text to replace stands {times} times, not once, in {edit.file}")
            found[edit.module] = before.replace(edit.was, edit.becomes)
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
