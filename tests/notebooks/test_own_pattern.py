"""The notebook on a pattern of one's own, executed as plain Python with other parameters than its own."""

from pathlib import Path
from typing import Any

import jupytext
import matplotlib.pyplot as plt
import pytest

from ring import Branch, Pattern

CELLS = jupytext.read(Path(__file__).parents[2] / "notebooks" / "00_your_own_pattern.py").cells
SMALL = {"CHECKED_TOKENS": 40, "HEAD_DIM": 4, "CHECKED_TYPES": ("float32",)}
PARAMETERS: dict[str, dict[str, Any]] = {
    "other branches and heads": {
        "SEGMENTS": [16, 64], "DILATIONS": [1, 3], "HEADS": 3, "KV_HEADS": 3, "CAUSAL": False, "TOKENS": 512,
        "ORDER": "striped", "RANKS": 1,
    },
    "documents": {
        "PATTERN": Pattern.dense(documents=(9, 0, 50, 1, 40), window=5).to_dict(), "TOKENS": 1, "HEADS": 3,
        "KV_HEADS": 1, "EXCHANGE": "direct", "ORDER": "zigzag by document",
    },
    "heads apart, odd sizes": {
        "PATTERN": Pattern((Branch(12, 3, (0, 2), range(1, 3)), Branch(None, 5, 1, range(2, 4), 20)), True),
        "TOKENS": 1001, "RANKS": 3, "HEADS": 4, "KV_HEADS": 2, "EXCHANGE": "gather", "ORDER": "hilbert",
        "CHECKED_TYPES": ("float64", "float16", "bfloat16"),
    },
    "nothing selected, fewer tokens than ranks": {
        "PATTERN": Pattern((Branch(3, 5, 4),)), "TOKENS": 5, "RANKS": 40, "HEADS": 1, "KV_HEADS": 1,
        "ORDER": "balanced", "CHECKED_TOKENS": 3,
    },
    "a tree": {"PATTERN": Pattern.tree([None, 0, 1, 0], [28, 10, 20, 30]), "ORDER": "balanced", "RANKS": 4},
    "spans beyond the checked tokens": {"PATTERN": Pattern.spans([(8, 20), (28, 90)], window=7), "TOKENS": 256},
    "noisy frames": {"PATTERN": Pattern.frames([12, 30, 6], noisy=True), "ORDER": "zigzag"},
}  # fmt: skip


@pytest.mark.parametrize("given", PARAMETERS)
def test_cells_run_with_other_parameters(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    assert [cell.metadata.get("tags") for cell in CELLS].count(["parameters"]) == 1
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in CELLS:
        if cell.cell_type == "code":
            exec(cell.source, names)
        if cell.metadata.get("tags") == ["parameters"]:
            changed = SMALL | PARAMETERS[given]
            assert set(changed) <= set(names)
            names |= changed
    assert len(names["cost"]) == 4 and len(names["found"]) == 4 * len(names["CHECKED_TYPES"])
