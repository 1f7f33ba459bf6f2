"""The README's table of other people's implementations, checked against the recorded runs notebooks/data/peers.json and
notebooks/data/training_peers.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "notebooks/data"
RECORDS = ("peers", "training_peers")  # of the columns after the version


def disagreements(page: str) -> list[str]:
    """What the table on a page, whose rows are | name[, name ...] | version | alone | in a training step |, says
    differently from the records.

    A result must begin with "held" where the peer held, with "not run" where it was not run, and else with the property
    that is broken; for a counter-example it must also state the ranks and tokens of the minimal Case, "2 ranks, 8
    tokens".
    """
    rows = {
        name.strip("` "): [cell.strip() for cell in cells[1:]]
        for line in page.splitlines()
        if len(cells := line.strip().strip("|").split("|")) == 4
        for name in cells[0].split(",")
    }
    found = []
    for column, record in enumerate(RECORDS):
        for peer in json.loads((DATA / f"{record}.json").read_text())["peers"]:
            version, *results = rows.get(peer["name"], ("", "", ""))
            if version != (peer["version"] or "-"):
                found.append(f"{peer['name']}: version {version!r} in place of {peer['version']}")
            if not re.match(_result(peer), results[column]):
                found.append(f"{peer['name']}: {results[column]!r} must be {_result(peer)!r}, as {record}.json has it")
    return found


def _result(peer: dict[str, Any]) -> str:
    if peer["verdict"] != "counter-example":
        return re.escape(peer["verdict"])
    sizes = "".join(
        rf"(?=.*\b{peer['case'][f'{noun}s' if noun == 'token' else 'world']} {noun}s?\b)" for noun in ("rank", "token")
    )
    return re.escape(peer["check"]) + sizes
