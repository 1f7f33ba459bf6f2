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
            if peer["name"] not in rows:
                found.append(f"{peer['name']} is not in the table")
                continue
            version, result = rows[peer["name"]][0], rows[peer["name"]][1 + column]
            wanted = [peer["version"] or "-", *_result(peer)]
            lacking = [x for x in wanted if not _says(version, result, x)]
            found += [f"{peer['name']}: {version} | {result} lacks {x!r} of {record}" for x in lacking]
    return found


def _result(peer: dict[str, Any]) -> list[str]:
    if peer["verdict"] != "counter-example":
        return [f"^{peer['verdict']}"]
    case = peer["case"]
    return [f"^{peer['check']}", _counted(case["world"], "rank"), _counted(case["tokens"], "token")]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _says(version: str, result: str, wanted: str) -> bool:
    if wanted.startswith("^"):
        return result.startswith(wanted[1:])
    return version == wanted or re.search(rf"\b{re.escape(wanted)}\b", result) is not None
