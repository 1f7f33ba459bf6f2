"""All seeded defects: small named changes of `ring`, of `reference/pattern.py` and of the training program of a rank
(`verification/training/rank/`), each of which the checks must find.

They are data, `defects/*.toml`, so that the source text that is replaced stands there as it stands in the code. A
defect is killed when the ordinary properties and laws find it. No check knows any of them. The catalogue follows a list
of defect classes that were seen in public ring-attention code, by number in `Defect.listed`, and adds others.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from verification.mutants.defect import Defect, Edit

FOLDER = Path(__file__).with_name("defects")
TOPICS = (
    "merge", "backward", "masks", "dilation", "diagonal", "communication", "process_groups", "numerics", "agreement",
    "keeping", "documents", "calls", "orders", "training_batches", "training_losses", "training_gradients",
    "training_modules", "training_compiled", "windows", "elsewhere_plans", "elsewhere_calls", "elsewhere_sizes",
    "elsewhere_again_plans", "elsewhere_again_calls", "elsewhere_third_plans",
    "elsewhere_third_calls", "elsewhere_third_training", "elsewhere_fourth_plans", "elsewhere_fourth_calls",
    "elsewhere_fifth_plans", "elsewhere_sixth_plans", "elsewhere_sixth_calls", "elsewhere_seventh_plans",
    "elsewhere_seventh_calls", "elsewhere_eighth_plans", "elsewhere_eighth_calls", "elsewhere_ninth_plans",
    "elsewhere_ninth_calls", "elsewhere_tenth_calls", "elsewhere_tenth_plans", "elsewhere_eleventh_plans",
    "elsewhere_eleventh_calls", "elsewhere_thirteenth_plans", "elsewhere_thirteenth_calls",
)  # fmt: skip


@dataclass(frozen=True)
class NoPlace:
    """A defect class, or a part of one, for which this architecture has no place. listed: its number, 0 for none."""

    name: str
    provenance: str
    why: str
    listed: int = 0


def _entries(file: str, kind: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads((FOLDER / f"{file}.toml").read_text())[kind]
    return entries


def of_topic(topic: str) -> tuple[Defect, ...]:
    """The defects of one file. Raises TypeError for an entry with a field that is missing or unknown."""
    found = []
    for entry in _entries(topic, "defect"):
        edits = tuple(Edit(**edit) for edit in entry["edits"])
        found.append(Defect(**entry | {"edits": edits, "listed": tuple(entry.get("listed", ()))}))
    return tuple(found)


DEFECTS = tuple(defect for topic in TOPICS for defect in of_topic(topic))
NO_PLACE = tuple(NoPlace(**entry) for entry in _entries("no_place", "no_place"))
_BY_NAME = {defect.name: defect for defect in DEFECTS}


def by_name(name: str) -> Defect:
    """Raises ValueError, with the names that are close to it, for one that there is not."""
    if name not in _BY_NAME:
        close = get_close_matches(name, _BY_NAME)
        nearest = f", close to it: {', '.join(close)}" if close else ""
        raise ValueError(f"{name!r} is no defect; it must be one of the {len(_BY_NAME)} of --list{nearest}")
    return _BY_NAME[name]
