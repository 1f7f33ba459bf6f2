"""The README is short and true: its examples run, the files it names exist, its tables are those of the records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers_table import disagreements
from verification.mutants.catalogue import DEFECTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / name
    for name in (
        "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reference/README.md", "ring/README.md",
        "ring/nn/README.md", "ring/nn/frameworks/README.md", "verification/training/README.md",
        "verification/README.md", "verification/CHECKLIST.md", "verification/mutants/README.md", "notebooks/README.md",
    )
]  # fmt: skip
DENSE = json.loads((ROOT / "notebooks/data/h200x2_dense.json").read_text())["rows"]
LONGNET = json.loads((ROOT / "notebooks/data/h200x2_longnet.json").read_text())["rows"]
PACKED = json.loads((ROOT / "notebooks/data/h100x1_packed.json").read_text())["rows"]
DIVISIBLE = json.loads((ROOT / "notebooks/data/h100x2_divisible.json").read_text())["rows"]
STEPS = json.loads((ROOT / "notebooks/data/model_steps_2xh200.json").read_text())["rows"]


def example(name: str) -> str:
    (found,) = re.findall(rf"```python\n(# {name}\.py.*?)```", README, re.DOTALL)
    return str(found)


def run(script: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_it_is_of_one_screen() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 1400


def test_the_example_runs_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "one_process.py"
    script.write_text(example("one_process"))
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("largest error ")) < 1e-5


@pytest.mark.ranks
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example("example"))
    done = run(script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_named_is_there(page: Path) -> None:
    text = page.read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []
    named = set(re.findall(r"`((?:reference|ring|verification|scripts|tests|notebooks)/[\w./]*\w)/?`", text))
    old = page.name == "CHANGELOG.md"  # which names what is no longer there, too
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == [] or old


def test_the_table_of_peers_is_the_record() -> None:
    assert disagreements(README) == []


# --- tables of records ------------------------------------------------------------------------------------------------

# A column of the table of speed, and the rows of the record that it is made of: the best of them is shown.
COLUMNS = {
    "kernels alone": lambda row: row["method"] == "kernels alone",
    "`ring_attention`, captured": lambda row: row["method"] == "ring_attention" and row["graph"],
    "not captured": lambda row: row["method"] == "ring_attention" and not row["graph"],
    "all-to-all (Ulysses)": lambda row: row["method"].startswith("all-to-all"),
    "ring-flash-attn zigzag": lambda row: row["method"] == "ring-flash-attn zigzag",
    "`context_parallel`": lambda row: row["method"].startswith("torch context_parallel"),
}


def table(first: str) -> list[dict[str, str]]:
    """The README's table whose first column has that title: a row as title -> cell."""
    lines = README.splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")]
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    titles, _, *rows = cells
    return [dict(zip(titles, row, strict=True)) for row in rows]


def test_the_table_of_speed_is_the_record() -> None:
    shown = table("tokens a GPU")
    assert [row["tokens a GPU"] for row in shown] == ["2 Ki", "8 Ki", "32 Ki"]
    for row in shown:
        tokens = 1024 * int(row["tokens a GPU"].split()[0])
        for title, chosen in COLUMNS.items():
            wanted: Any = [
                one["efficiency"]
                for one in DENSE
                if one["tokens"] == tokens and one["pass"] == "forward+backward" and chosen(one)
            ]
            assert row[title] == f"{max(wanted):.2f}", (title, tokens)


def test_the_steps_of_models_are_the_record() -> None:
    for kind in ("llama", "longnet"):
        ours = {row["tokens"]: row for row in STEPS if (row["model"], row["way"]) == (kind, "ours")}
        assert list(ours) == [512, 2048, 8192, 32768]
        assert ", ".join(f"{row['of_best_peer']:.2f}" for row in ours.values()) in README, kind


def test_the_times_of_longnet_are_the_record() -> None:
    for passed in ("forward", "forward+backward"):
        of = [row for row in LONGNET if row["pass"] == passed and row["tokens"] == 2**19 and row.get("ms")]
        ours = min(row["ms"] for row in of if row["method"] == "ring_attention")
        published = min(row["ms"] for row in of if row["method"] == "LongNet as published")
        assert f"{ours:.3g} ms against {published:.3g}" in README, (passed, ours, published)


def test_the_times_of_packed_documents_are_the_record() -> None:
    def fastest(rows: list[dict[str, Any]], mean: int, method: str) -> str:
        of = [x for x in rows if (x["mean_length"], x["method"], x["pass"]) == (mean, method, "forward+backward")]
        return f"{min(row['ms'] for row in of):.2g}"

    ours, whole = (
        [fastest(PACKED, mean, method) for mean in (4096, 512)]
        for method in ("ring_attention", "one GPU, whole sequence")
    )
    assert f"{ours[0]} ms, FlashAttention-2's single call {whole[0]} (mean 4 Ki); {ours[1]} and {whole[1]}" in README
    ring, zigzag = (
        fastest(DIVISIBLE, 4096, method) for method in ("ring_attention", "ring-flash-attn zigzag, by document")
    )
    assert f"two H100s: {ring} ms, ring-flash-attn's zigzag {zigzag} (mean 4 Ki)" in README


def test_the_parts_of_the_seeded_defects_that_are_found_are_the_record() -> None:
    lines = (ROOT / "notebooks/data/seeded_defects.jsonl").read_text().splitlines()
    found = {row["name"]: row["examples"] for row in map(json.loads, lines) if row["check"] is not None}
    public = [defect.name for defect in DEFECTS if defect.provenance != "own"]
    soon, late = (sum(found.get(name, most + 1) <= most for name in public) for most in (30, 300))
    assert f"of {len(public)} bugs seen in public" in README
    assert f"{soon} are found within 30 examples and {late} within 300" in README
