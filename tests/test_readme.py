"""The README is true: its examples run, the files that pages name exist, its numbers are those of the records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers_table import disagreements
from verification.mutants.catalogue import DEFECTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PATH = r"(?<![\w./])((?:reference|ring|verification|scripts|tests|notebooks|\.ci)/[\w./]*\w)(?![\w*])"
PAGES = sorted({ROOT / "notebooks/README.md", *ROOT.glob("*.md")} | {
    page for package in ("reference", "ring", "verification") for page in (ROOT / package).rglob("*.md")
})  # fmt: skip


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a record with these values."""
    recorded: list[dict[str, Any]] = json.loads((ROOT / f"notebooks/data/{name}.json").read_text())["rows"]
    return [row for row in recorded if all(row.get(key) == value for key, value in wanted.items())]


def fastest(name: str, method: str, **wanted: Any) -> float:
    return min(row["ms"] for row in rows(name, method=method, **wanted) if row.get("ms"))


@pytest.mark.ranks
@pytest.mark.parametrize("name, ranks", [("one_process", 1), ("example", 2)])
def test_the_examples_run(tmp_path: Path, name: str, ranks: int) -> None:
    (text,) = re.findall(rf"```python\n(# {name}\.py.*?)```", README, re.DOTALL)
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *torchrun, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ranks > 1 or float(done.stdout.removeprefix("largest error ")) < 1e-5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_named_is_there(page: Path) -> None:
    text = page.read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []
    named = set(re.findall(PATH, text))
    old = page.name == "CHANGELOG.md"  # which names what is no longer there, too
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == [] or old


def test_the_table_of_peers_is_the_record() -> None:
    assert disagreements(README) == []


# A column of the table of speed, and the rows of the record that it is made of: the best of them is shown.
COLUMNS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "kernels alone": lambda row: row["method"] == "kernels alone",
    "`ring_attention`, captured": lambda row: row["method"] == "ring_attention" and row["graph"],
    "not captured": lambda row: row["method"] == "ring_attention" and not row["graph"],
    "all-to-all (Ulysses)": lambda row: row["method"].startswith("all-to-all"),
    "ring-flash-attn zigzag": lambda row: row["method"] == "ring-flash-attn zigzag",
    "`context_parallel`": lambda row: row["method"].startswith("torch context_parallel"),
}


def test_the_table_of_speed_is_the_record() -> None:
    (table,) = re.findall(r"^(\| tokens a GPU \|.*?)\n\n", README, re.DOTALL | re.MULTILINE)
    titles, _, *shown = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    for size, cells in zip((2, 8, 32), shown, strict=True):
        measured = rows("h200x2_dense", tokens=1024 * size, **{"pass": "forward+backward"})
        best = {title: max(row["efficiency"] for row in measured if of(row)) for title, of in COLUMNS.items()}
        row = dict(zip(titles, cells, strict=True))
        assert row["tokens a GPU"] == f"{size} Ki"
        assert {title: row[title] for title in COLUMNS} == {title: f"{value:.2f}" for title, value in best.items()}


def test_the_numbers_in_the_text_are_the_record() -> None:
    claims = []
    for kind in ("llama", "longnet"):
        steps = {row["tokens"]: row["of_best_peer"] for row in rows("model_steps_2xh200", model=kind, way="ours")}
        claims.append(", ".join(f"{steps[tokens]:.2f}" for tokens in (512, 2048, 8192, 32768)))
    for passed in ("forward", "forward+backward"):
        methods, of = ("ring_attention", "LongNet as published"), {"tokens": 2**19, "pass": passed}
        claims.append("{:.3g} ms against {:.3g}".format(*(fastest("h200x2_longnet", one, **of) for one in methods)))
    (long, whole), (short, other) = (
        [fastest("h100x1_packed", method, mean_length=mean, **{"pass": "forward+backward"})
         for method in ("ring_attention", "one GPU, whole sequence")] for mean in (4096, 512)
    )  # fmt: skip
    packed = f"{long:.2g} ms, FlashAttention-2's single call {whole:.2g} (mean 4 Ki); {short:.2g} and {other:.2g}"
    ours, zigzag = (
        fastest("h100x2_divisible", method, mean_length=4096, **{"pass": "forward+backward"})
        for method in ("ring_attention", "ring-flash-attn zigzag, by document")
    )
    claims += [packed, f"two H100s: {ours:.2g} ms, ring-flash-attn's zigzag {zigzag:.2g} (mean 4 Ki)"]
    lines = map(json.loads, (ROOT / "notebooks/data/seeded_defects.jsonl").read_text().splitlines())
    found = {row["name"]: row["examples"] for row in lines if row["check"] is not None}
    public = [defect.name for defect in DEFECTS if defect.provenance != "own"]
    soon, late = (sum(found.get(name, most + 1) <= most for name in public) for most in (30, 300))
    claims += [f"of {len(public)} bugs seen in public"]
    claims += [f"{soon} are found within 30 examples and {late} within 300"]
    assert [claim for claim in claims if claim not in README] == []
