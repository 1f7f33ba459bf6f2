"""The README's table of other people's implementations, checked against the recorded runs in notebooks/data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "notebooks/data"


def disagreements(page: str) -> list[str]:
    """Differences of a page's table, | name[, name ...] | version | alone | in a training step |, from the records: a
    verdict, or the property that is broken and the minimal Case's "2 ranks, 8 tokens"."""
    rows = {
        name.strip("` "): [cell.strip() for cell in cells[1:]]
        for line in page.splitlines()
        if len(cells := line.strip().strip("|").split("|")) == 4
        for name in cells[0].split(",")
    }
    found = []
    for column, record in enumerate(("peers", "training_peers")):
        for peer in json.loads((DATA / f"{record}.json").read_text())["peers"]:
            version, *results = rows.get(peer["name"], ("", "", ""))
            if version != (peer["version"] or "-") or not re.match(_result(peer), results[column]):
                found.append(f"{peer['name']}: {version!r}, {results[column]!r}; {record}.json: {_result(peer)!r}")
    return found


def _result(peer: dict[str, Any]) -> str:
    if (case := peer["case"]) is None:
        return re.escape(peer["verdict"])
    return rf"{re.escape(peer['check'])}(?=.*\b{case['world']} ranks?\b)(?=.*\b{case['tokens']} tokens?\b)"
