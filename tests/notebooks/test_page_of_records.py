"""notebooks/README.md names every notebook, and every record with the commit that it was made at."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "notebooks"
PAGE = (FOLDER / "README.md").read_text()


def test_every_notebook_is_named() -> None:
    assert [file.name for file in sorted(FOLDER.glob("*.ipynb")) if f"({file.name})" not in PAGE] == []


def test_every_record_is_named_with_its_commit() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for file in sorted((FOLDER / "data").glob("*.json")):
        (row,) = [line for line in rows if f"`{file.stem}`" in line]
        assert f"| {json.loads(file.read_text())['commit'][:7]} |" in row, file.stem
