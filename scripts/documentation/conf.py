"""Settings of sphinx, which `scripts/docs` runs: pages where they lie in the repository, and docstrings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ring  # noqa: E402

project, release = "ring-dilated-attention", ring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "scripts/documentation/index"
packages = ("reference", "ring", "verification", "notebooks")
include_patterns = ["*.md", *(f"{name}/**.md" for name in packages), "scripts/documentation/*.md"]
html_theme, html_title = "furo", f"{project} {release}"
myst_heading_anchors = 4
autodoc_typehints, autodoc_member_order = "description", "bysource"
napoleon_numpy_docstring = False


def show_programs(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Make what stands deeper than the text before it, after an empty line, a literal block, as in the source."""
    text, before = lines[:], 0
    lines.clear()
    for number, line in enumerate(text):
        depth = len(line) - len(line.lstrip()) if line.strip() else before
        if depth > before and number and not text[number - 1].strip():
            lines += [" " * before + "::", ""]
        before = depth
        lines.append(line)


def setup(app: Any) -> None:
    """Connect to sphinx, before napoleon reads the docstrings."""
    app.connect("autodoc-process-docstring", show_programs, priority=100)
