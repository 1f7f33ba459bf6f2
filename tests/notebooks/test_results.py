"""The page of results quotes what its notebooks print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
_, _, *LINES = [line for line in (FOLDER / "RESULTS.md").read_text().splitlines() if line.startswith("|")]
ROWS = [line.split(" | ") for line in LINES]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| ")[:40])
def test_a_result_is_printed_by_its_notebook(row: list[str]) -> None:
    _, verdict, printed, notebook = row
    (quoted,), (file,) = re.findall("`([^`]+)`", printed), re.findall(r"\((.+\.ipynb)\)", notebook)
    cells = json.loads((FOLDER / file).read_text())["cells"]
    outputs = ["".join(out["text"]) for cell in cells for out in cell.get("outputs", []) if "text" in out]
    assert any(quoted in text for text in outputs), (file, quoted)
    assert verdict.startswith(("held", "not held"))
