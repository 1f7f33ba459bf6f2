"""The README is true: the files that pages name exist, its numbers are those of the records."""

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
README, SPEED, VERIFICATION = ((ROOT / name / "README.md").read_text() for name in ("", "notebooks", "verification"))
PATH = r"(?<![\w./])((?:reference|ring|verification|scripts|tests|notebooks|\.ci)/[\w./]*\w)(?![\w*])"
PAGES = sorted(
    {ROOT / "notebooks/README.md", *ROOT.glob("*.md")}
    | {page for package in ("reference", "ring", "verification") for page in (ROOT / package).rglob("*.md")}
)


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a record with these values."""
    recorded: list[dict[str, Any]] = json.loads((ROOT / f"notebooks/data/{name}.json").read_text())["rows"]
    return [row for row in recorded if all(row.get(key) == value for key, value in wanted.items())]


def fastest(name: str, *methods: str, **wanted: Any) -> list[float]:
    """The least milliseconds of each method, forward and backward unless it says otherwise."""
    of = {"pass": "forward+backward"} | wanted
    return [min(row["ms"] for row in rows(name, method=method, **of) if row.get("ms")) for method in methods]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_named_is_there(page: Path) -> None:
    text = page.read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []
    named = set(re.findall(PATH, text))
    old = page.name == "CHANGELOG.md"  # which names what is no longer there, too
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == [] or old


def test_the_table_of_peers_is_the_record() -> None:
    assert disagreements((ROOT / "verification/PEERS.md").read_text()) == []


# A column of the table of speed, and the rows of the record that it is made of: the best of them is shown.
COLUMNS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "kernels alone": lambda row: row["method"] == "kernels alone" and row["kernel"] == "fa4",
    "`direct`": lambda row: row["method"] == "ring_attention" and row["exchange"] == "direct",
    "`direct`, not captured": lambda row: COLUMNS["`direct`"](row) and not row["graph"],
    "`direct-kept`": lambda row: row["method"] == "ring_attention" and row["exchange"] == "direct-kept",
    "`all-to-all`": lambda row: row["method"] == "ring_attention" and row["exchange"] == "all-to-all",
    "`all-to-all-kept`": lambda row: row["method"] == "ring_attention" and row["exchange"] == "all-to-all-kept",
    "all-to-all by NCCL": lambda row: row["method"].startswith("all-to-all"),
    "ring-flash-attn zigzag": lambda row: row["method"] == "ring-flash-attn zigzag",
    "`context_parallel`": lambda row: row["method"].startswith("torch context_parallel"),
}


def test_the_table_of_speed_is_the_record() -> None:
    assert f"| tokens a GPU | {' | '.join(COLUMNS)} |" in SPEED
    for size, tokens in (("512", 512), ("2 Ki", 2048), ("8 Ki", 8192), ("32 Ki", 32768)):
        measured = rows("h200x2_dense", tokens=tokens, **{"pass": "forward+backward"})
        best = [max(row["efficiency"] for row in measured if of(row)) for of in COLUMNS.values()]
        assert f"| {size} | {' | '.join(f'{value:.2f}' for value in best)} |" in SPEED


def test_the_tables_of_steps_and_times_are_the_record() -> None:
    steps: dict[str, list[str]] = {}
    for row in rows("model_steps_2xh200"):
        if "exchange" in row and row["way"] != "ours-unchecked":
            name = {"llama": "Llama", "longnet": "LongNet"}[row["model"]]
            steps.setdefault(f"{name}-shaped | `{row['exchange']}`", []).append(f"{row['of_best_peer']:.2f}")
    claims = [f"| {name} | {' | '.join(shares)} |" for name, shares in steps.items()]
    on_four = [row for name in ("", "_32ki") for row in rows(f"fa4/model_steps_4xh200{name}", way="ours")]
    shares = {row["tokens"]: f"{row['of_best_peer']:.2f}" for row in reversed(on_four)}
    claims.append("{}, {}, {} and {}".format(*(shares[tokens] for tokens in (512, 2048, 8192, 32768))))
    for passed in ("forward", "forward+backward"):
        ours, published = fastest(
            "h200x2_longnet", "ring_attention", "LongNet as published", tokens=2**19, **{"pass": passed}
        )
        claims.append(
            f", {passed.replace('+', ' + ')} | 2 H200 | {ours:.3g} | {published:.3g} | LongNet as published |"
        )
    by_heads = "h200x2_by_heads"
    for tokens, gpus, record in ((2, 2, by_heads), (8, 2, by_heads), (32, 2, by_heads), (8, 4, "h200x4_dense")):
        where = {"tokens": tokens * 2**10, "pass": "forward+backward"}
        ours = min(
            row["ms"] for row in rows(f"exchanges/{record}", method="ring_attention", exchange="all-to-all", **where)
        )
        nccl = min(row["ms"] for row in rows(f"exchanges/{record}", method="all-to-all (Ulysses)", **where))
        claims.append(f"{tokens} Ki tokens a GPU, forward + backward | {gpus} H200 | {ours:.3g} | {nccl:.3g} |")
    whole, fa4 = "one GPU, whole sequence", "FlashAttention-4's single call"
    llama3, zigzag = "ring-flash-attn llama3, 8 heads at a time", "ring-flash-attn zigzag, by document"
    on_fa4 = {llama3: "ring-flash-attn's llama3", zigzag: "ring-flash-attn's zigzag"}
    for kind, size, gpus, record, other in (
        ("mean_length", 4096, 1, "h200x1_packed", whole), ("mean_length", 512, 1, "h200x1_packed", whole),
        ("mean_length", 512, 2, "h200x2_packed", llama3), ("mean_length", 4096, 2, "h200x2_divisible", zigzag),
        ("window", 1023, 1, "h200x1_window", whole), ("window", 1023, 2, "h200x2_window", llama3),
        ("window", 4095, 2, "h200x2_window", llama3),
    ):  # fmt: skip
        ours, theirs = fastest(record, "ring_attention", other, **{kind: size, "tokens": 2**16 // gpus})
        length = f"mean length {'4 Ki' if size == 4096 else size}" if kind == "mean_length" else f"window of {size}"
        name = fa4 if other is whole else f"{on_fa4[other]} on FlashAttention-4"
        passes = ", forward + backward" if kind == "window" else ""
        claims.append(f"{length}, 64 Ki tokens{passes} | {gpus} H200 | {ours:.2g} | {theirs:.2g} | {name} |")
    assert [claim for claim in claims if claim not in SPEED] == []


def test_the_share_of_seeded_defects_is_the_record() -> None:
    lines = map(json.loads, (ROOT / "notebooks/data/seeded_defects.jsonl").read_text().splitlines())
    examples = {row["name"]: row["examples"] for row in lines if row["check"] is not None}
    public = [defect.name for defect in DEFECTS if defect.provenance != "own"]
    soon, late = (sum(examples.get(name, most + 1) <= most for name in public) for most in (30, 300))
    for page in (README, VERIFICATION):
        assert f"of {len(public)} bugs seen in public" in page
        assert f"{soon} are found within 30 examples and {late} within 300" in page


def test_the_front_page_is_short() -> None:
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert len([line for line in text.splitlines() if line]) <= 70 and len(README.split()) <= 900


def test_the_picture_of_the_front_page_is_drawn(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/front_picture.py"), str(tmp_path / "front.svg")]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "front.svg").read_text() == (ROOT / "ring/images/front.svg").read_text()


@pytest.mark.slow
@pytest.mark.ranks
def test_the_doors_print_what_they_show(tmp_path: Path) -> None:
    """The counter-example with its cause, and the losses of a Llama to seven digits: others follow the machine."""
    blocks = re.findall(r"```\n(\$ .*?)```", README, re.DOTALL)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    shown: list[list[str]] = []
    printed: list[str] = []
    for block in blocks:
        for line in block.splitlines():
            if line.startswith("$ "):
                words = line[2:].replace("torchrun", "python -m torch.distributed.run --standalone").split()
                command = [sys.executable, *(str(ROOT / x) if x.startswith("tests/") else x for x in words[1:])]
                done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
                printed.append(" ".join(done.stdout.split()))
                shown.append([])
            else:
                shown[-1].append(line)
    counter_example, *losses = zip(shown, printed, strict=True)
    title, *_, first, second, _, _ = (" ".join(line.split()) for line in counter_example[0])
    assert title in counter_example[1] and f"{first} {second}" in counter_example[1]
    assert len(losses) == 2
    for lines, output in losses:
        assert [f"{float(x):.6f}" for x in output.split()] == [f"{float(x):.6f}" for x in lines]


@pytest.mark.ranks
def test_the_minimal_ring_is_the_oracle() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "minimal_ring.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT / "scripts", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest error") == 8
