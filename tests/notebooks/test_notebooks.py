"""The notebooks as they are committed: each pair agrees, was executed from top to bottom, and is small.

`scripts/notebooks --run`, with which `scripts/test` ends, checks that they run and that their claims hold.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import jupytext
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
LARGEST = 400 * 1024  # bytes: a code host shows it


def notebook_of(source: Path) -> Any:
    return jupytext.read(source.with_suffix(".ipynb"))


def test_every_notebook_is_one_of_a_pair() -> None:
    names = [source.stem for source in SOURCES]
    assert names and names == sorted(file.stem for file in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_pair_agrees(source: Path) -> None:
    """`scripts/notebooks --save` makes the notebook of its source."""
    pair = jupytext.read(source), notebook_of(source)
    one, other = ([(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in pair)
    assert one == other
    assert pair[1].metadata.jupytext.formats == pair[0].metadata.jupytext.formats == "ipynb,py:percent"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_what_is_shown_comes_from_one_run_without_errors(source: Path) -> None:
    cells = [cell for cell in notebook_of(source).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    assert not [out for cell in cells for out in cell.outputs if out.get("name") == "stderr"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_is_small_and_names_no_place_on_a_machine(source: Path) -> None:
    file = source.with_suffix(".ipynb")
    assert file.stat().st_size <= LARGEST
    shown = file.read_text()
    assert not [place for place in ("/home/", "/tmp/", "/root/", str(FOLDER.parent)) if place in shown]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_asserts_and_draws(source: Path) -> None:
    cells = [cell for cell in notebook_of(source).cells if cell.cell_type == "code"]
    drawn = [out for cell in cells for out in cell.outputs if "image/png" in out.get("data", {})]
    assert drawn and any("assert " in cell.source for cell in cells)


def test_figures_of_the_readme_are_the_notebooks_own() -> None:
    """A figure that changed with `scripts/notebooks --save` must be copied to images/ again."""
    drawn = set()
    for source in SOURCES:
        for cell in notebook_of(source).cells:
            images = [out.data.get("image/png") for out in cell.get("outputs", ()) if "data" in out]
            drawn |= {base64.b64decode(image) for image in images if image is not None}
    readme = FOLDER.parent / "README.md"
    shown = [readme.parent / file for file in re.findall(r"!\[.*?\]\((.*?)\)", readme.read_text())]
    assert shown
    kept = {*shown, *(FOLDER / "images").glob("*")}
    assert [file.name for file in sorted(kept) if file.read_bytes() not in drawn] == []
