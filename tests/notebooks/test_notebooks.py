"""The notebooks as they are committed: each pair agrees, was executed from top to bottom, and is named on the page.

`scripts/notebooks --run`, with which `scripts/test` ends, checks that they run and that their claims hold.
"""

import ast
import base64
import json
import re
from pathlib import Path

import jupytext
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
PAGE = (FOLDER / "README.md").read_text()
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
LARGEST = 400 * 1024  # bytes: a code host shows it


def test_every_notebook_is_one_of_a_pair() -> None:
    names = [source.stem for source in SOURCES]
    assert names and names == sorted(file.stem for file in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_is_its_source_executed_once(source: Path) -> None:
    """`scripts/notebooks --save` makes the notebook of its source."""
    file = source.with_suffix(".ipynb")
    pair = jupytext.read(source), jupytext.read(file)
    one, other = (
        [(cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells] for notebook in pair
    )
    assert one == other
    assert pair[1].metadata.jupytext.formats == pair[0].metadata.jupytext.formats == "ipynb,py:percent"
    cells = [cell for cell in pair[1].cells if cell.cell_type == "code"]
    outputs = [out for cell in cells for out in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert [out for out in outputs if "image/png" in out.get("data", {})]
    assert any("assert " in cell.source for cell in cells)
    assert file.stat().st_size <= LARGEST and f"({file.name})" in PAGE
    assert not [place for place in ("/home/", "/tmp/", "/root/", str(FOLDER.parent)) if place in file.read_text()]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_parameters_follow_the_imports_and_count(source: Path) -> None:
    """papermill takes other assignments for no parameters, and sets a parameter in a cell that it adds after these."""
    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    assert [cell.metadata.get("tags", []) for cell in cells] == [[], ["parameters"], *[[]] * (len(cells) - 2)]
    imports, parameters, *others = [ast.parse(cell.source) for cell in cells]
    assert all(isinstance(statement, (ast.Import, ast.ImportFrom, ast.Expr)) for statement in imports.body)
    lines = cells[1].source.splitlines()
    assert [line for line in lines if not re.match("[A-Z][A-Z_]* = ", line)] == []
    assert len(lines) == len(parameters.body)
    names = {line.partition(" = ")[0] for line in lines}
    seen = [node for cell in others for node in ast.walk(cell) if isinstance(node, ast.Name)]
    assert names <= {name.id for name in seen if isinstance(name.ctx, ast.Load)}
    assert names.isdisjoint(name.id for name in seen if isinstance(name.ctx, ast.Store))


def test_figures_of_the_page_are_the_notebooks_own() -> None:
    """A figure that changed with `scripts/notebooks --save` must be copied to images/ again."""
    notebooks = [json.loads(source.with_suffix(".ipynb").read_text()) for source in SOURCES]
    outputs = [out for notebook in notebooks for cell in notebook["cells"] for out in cell.get("outputs", ())]
    images = [out.get("data", {}).get("image/png") for out in outputs]
    drawn = {base64.b64decode("".join(image)) for image in images if image}
    shown = [FOLDER / file for file in re.findall(r"!\[.*?\]\((.*?)\)", PAGE)]
    assert shown
    assert [file.name for file in {*shown, *(FOLDER / "images").glob("*")} if file.read_bytes() not in drawn] == []


def test_every_record_is_named_with_its_commit() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for file in sorted((FOLDER / "data").glob("*.json")):
        (row,) = [line for line in rows if f"`{file.stem}`" in line.split(" | ")[0]]
        assert f"| {json.loads(file.read_text())['commit'][:7]} |" in row, file.stem
