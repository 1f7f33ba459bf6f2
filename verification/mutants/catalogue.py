"""The catalogue of seeded defects: bugs seen in public code and planted here, each of which a check must find.

They are data: `defects/*.toml`, one file per topic. A defect is killed if an ordinary property or law breaks; no check
knows of any defect. Most have a public provenance, and follow a list of defect classes seen in public ring-attention
code (`Defect.listed`). The "own" ones stand for classes without a public example.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from verification.mutants.defect import Defect, Edit

FOLDER = Path(__file__).with_name("defects")
TOPICS = tuple(sorted(file.stem for file in FOLDER.glob("*.toml") if file.stem != "no_place"))


@dataclass(frozen=True)
class NoPlace:
    """A defect class, or a part of one, that cannot occur in this architecture. listed: its number, 0 for none."""

    name: str
    provenance: str
    why: str
    listed: int = 0


def _entries(file: str, kind: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads((FOLDER / f"{file}.toml").read_text())[kind]
    return entries


def read_topic(topic: str) -> tuple[Defect, ...]:
    """Return the defects of one file. Raises TypeError for an entry with a missing or unknown field."""
    defects = []
    for entry in _entries(topic, "defect"):
        edits = tuple(Edit(**edit) for edit in entry["edits"])
        defects.append(Defect(**entry | {"edits": edits, "listed": tuple(entry.get("listed", ()))}))
    return tuple(defects)


DEFECTS = tuple(defect for topic in TOPICS for defect in read_topic(topic))
NO_PLACE = tuple(NoPlace(**entry) for entry in _entries("no_place", "no_place"))
_BY_NAME = {defect.name: defect for defect in DEFECTS}


def by_name(name: str) -> Defect:
    """Return the defect of that name. Raises ValueError, with similar names, for an unknown one."""
    if name not in _BY_NAME:
        close = get_close_matches(name, _BY_NAME)
        nearest = f", close to it: {', '.join(close)}" if close else ""
        raise ValueError(f"{name!r} is no defect; it must be one of the {len(_BY_NAME)} of --list{nearest}")
    return _BY_NAME[name]
