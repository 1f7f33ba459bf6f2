"""What a seeded defect is: a few replacements of text in the source, a name, and where the like was seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]


class CannotPlant(Exception):
    """A defect that cannot be brought into the running code: a fault of the tool, no verdict on what is verified."""


@dataclass(frozen=True)
class Edit:
    """One replacement. file: "ring/strided_view.py"; `was` occurs exactly once in it."""

    file: str
    was: str
    becomes: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class Defect:
    """One seeded defect.

    name        kebab-case, unique
    provenance  where the like was seen, as project#number or by name; "own": thought of here
    about       one sentence: what is wrong and what it does
    edits       all of them together are the defect
    listed      its numbers in the project's list of defect classes that were seen in public ring-attention code, which
                the catalogue and `NO_PLACE` cover together
    backend     "gloo" where the broken code runs on real process groups only
    """

    name: str
    provenance: str
    about: str
    edits: tuple[Edit, ...]
    listed: tuple[int, ...] = ()
    backend: Literal["sim", "gloo"] = "sim"

    def sources(self) -> dict[str, str]:
        """The edited source of every module concerned, by the module's name. Raises CannotPlant."""
        found: dict[str, str] = {}
        for edit in self.edits:
            before = found.get(edit.module) or (ROOT / edit.file).read_text()
            times = before.count(edit.was)
            if times != 1:
                raise CannotPlant(f"{self.name}: the text to replace stands {times} times, not once, in {edit.file}")
            if edit.was == edit.becomes:
                raise CannotPlant(f"{self.name}: nothing is changed in {edit.file}")
            found[edit.module] = before.replace(edit.was, edit.becomes)
        if not found:
            raise CannotPlant(f"{self.name}: there is nothing to edit")
        return found
