"""The README is true: its examples run, the files that pages name exist, its numbers are those of the records."""

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


def fastest(name: str, *methods: str, **wanted: Any) -> list[float]:
    """The least milliseconds of each method, forward and backward unless it says otherwise."""
    of = {"pass": "forward+backward"} | wanted
    return [min(row["ms"] for row in rows(name, method=method, **of) if row.get("ms")) for method in methods]


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
    assert f"| tokens a GPU | {' | '.join(COLUMNS)} |" in README
    for size in (2, 8, 32):
        measured = rows("h200x2_dense", tokens=1024 * size, **{"pass": "forward+backward"})
        best = [max(row["efficiency"] for row in measured if of(row)) for of in COLUMNS.values()]
        assert f"| {size} Ki | {' | '.join(f'{value:.2f}' for value in best)} |" in README


def test_the_numbers_in_the_text_are_the_record() -> None:
    claims = []
    for kind in ("llama", "longnet"):
        steps = {row["tokens"]: row["of_best_peer"] for row in rows("model_steps_2xh200", model=kind, way="ours")}
        claims.append(", ".join(f"{steps[tokens]:.2f}" for tokens in (512, 2048, 8192, 32768)))
    whole, zigzag = "one GPU, whole sequence", "ring-flash-attn zigzag, by document"
    for passed in ("forward", "forward+backward"):
        times = fastest("h200x2_longnet", "ring_attention", "LongNet as published", tokens=2**19, **{"pass": passed})
        claims.append("{:.3g} ms against {:.3g}".format(*times))
    long, short = (fastest("h100x1_packed", "ring_attention", whole, mean_length=mean) for mean in (4096, 512))
    packed = "{:.2g} ms, FlashAttention-2's single call {:.2g} (mean 4 Ki); {:.2g} and {:.2g}"
    two = fastest("h100x2_divisible", "ring_attention", zigzag, mean_length=4096)
    claims.append(packed.format(*long, *short))
    claims.append("two H100s: {:.2g} ms, ring-flash-attn's zigzag {:.2g} (mean 4 Ki)".format(*two))
    lines = map(json.loads, (ROOT / "notebooks/data/seeded_defects.jsonl").read_text().splitlines())
    found = {row["name"]: row["examples"] for row in lines if row["check"] is not None}
    public = [defect.name for defect in DEFECTS if defect.provenance != "own"]
    soon, late = (sum(found.get(name, most + 1) <= most for name in public) for most in (30, 300))
    claims += [f"of {len(public)} bugs seen in public", f"{soon} are found within 30 examples and {late} within 300"]
    assert [claim for claim in claims if claim not in README] == []
