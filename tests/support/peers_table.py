"""The README's table of other people's implementations, checked against the recorded run notebooks/data/peers.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[2] / "notebooks/data/peers.json"


def disagreements(page: str) -> list[str]:
    """What the table on a page, whose rows are | name | version | result |, says differently from the record.

    A result must begin with "held" where the peer held, with "not run" where it was not run, and else with the property
    that is broken; for a counter-example it must also state the ranks and tokens of the minimal Case, "2 ranks, 8
    tokens".
    """
    rows = {
        cells[0].strip("` "): (cells[1].strip(), cells[2].strip())
        for line in page.splitlines()
        if len(cells := line.strip().strip("|").split("|")) == 3
    }
    found = []
    for peer in json.loads(RECORD.read_text())["peers"]:
        if peer["name"] not in rows:
            found.append(f"{peer['name']} is not in the table")
            continue
        version, result = rows[peer["name"]]
        wanted = [peer["version"] or "-", *_result(peer)]
        found += [f"{peer['name']}: {version} | {result} lacks {x!r}" for x in wanted if not _says(version, result, x)]
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
