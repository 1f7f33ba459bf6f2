"""Training steps of whole models on two ranks over gloo: every way is there or says why it is not, all compute the
same, and one that does not is reported and not timed. No test looks at speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from verification.benchmarks.step_check import MOST
from verification.benchmarks.step_models import SHAPES
from verification.benchmarks.step_results import STEP_COLUMNS, table_line
from verification.benchmarks.step_sections import compare
from verification.benchmarks.step_timing import StepTime, Turns
from verification.benchmarks.step_ways import MEANING, StepProblem, names_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "bench_model.py"
FEW = ("--device", "cpu", "--tokens", "32", "--warmup", "1", "--rounds", "2", "--steps", "1", "--minutes", "60")


def started(file: Path, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(program),
         "--json", str(file), *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip


def rows_of(file: Path, program: Path, *arguments: str) -> list[dict[str, Any]]:
    done = started(file, program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_every_way_of_both_models_is_timed_or_says_why_not(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "record.json", SCRIPT, "--only", "eager", *FEW)
    for kind in ("llama", "longnet"):
        assert tuple(row["way"] for row in rows if row["model"] == kind) == names_of(kind)
    without = {row["way"]: row["left_out"] for row in rows if "left_out" in row}
    assert "GPUs only" in without.pop("context-parallel") and set(without) <= {"zigzag"}, without
    timed = [row for row in rows if "ms" in row]
    assert len(timed) == len(rows) - 1 - len(without)
    for row in timed:
        assert set(row) <= set(STEP_COLUMNS) and len(row["rounds"]) == 2
        assert row["losses_off"] <= MOST * row["rounding_losses"]
        assert row["way"] == "published" or row["gradients_off"] <= MOST * row["rounding_gradients"]
        assert 0 < row["host_ms"] <= row["wall_ms"]
    (published,) = [row for row in timed if row["way"] == "published"]
    assert published["gradients_off"] > MOST * published["rounding_gradients"], "its weights are constants"


def test_a_compiled_step_computes_the_same_in_one_graph(tmp_path: Path) -> None:
    chosen = ("--only", "compiled", "--models", "longnet", "--ways", "one-gpu", "ours", *FEW)
    for row in rows_of(tmp_path / "record.json", SCRIPT, *chosen):
        assert row["mode"] == "compiled" and row["ms"] > 0
        assert row["gradients_off"] <= MOST * row["rounding_gradients"]


def test_a_way_that_computes_something_else_is_not_timed(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    program = ROOT / "tests" / "support" / "step_program.py"
    chosen = ("--only", "eager", "--models", "llama", "--ways", "ours", "all-to-all", *FEW, "--tokens", "32", "64")
    done = started(file, program, *chosen)
    assert done.returncode == 1 and "error: all-to-all of llama, eager: losses are off by" in done.stderr, done.stderr
    assert "exitcode  : 1" in done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert sorted((row["tokens"], row["way"]) for row in rows) == [
        (size, way) for size in (32, 64) for way in ("all-to-all", "ours")
    ]
    for row in rows:
        if row["way"] == "ours":
            assert row["ms"] > 0 and "best_peer" not in row
        else:
            assert "losses are off by" in row["wrong"] and "ms" not in row


def test_recomputed_layers_under_fsdp_have_the_loss_of_one_process(tmp_path: Path) -> None:
    chosen = ("--device", "cpu", "--tokens", "64", "--steps", "1", "--recompute", "none", "attention-kept", "--compare")
    rows = rows_of(tmp_path / "record.json", SCRIPT, *chosen)
    assert [row["recompute"] for row in rows] == ["none", "attention-kept"]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert all(row["relative_difference"] < torch.finfo(torch.bfloat16).eps for row in rows)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_ours_is_compared_with_the_fastest_peer_and_with_the_ceiling() -> None:
    problem = StepProblem("llama", SHAPES["cpu"], 32, 0, 2, torch.device("cpu"))
    rows: dict[str, dict[str, Any]] = {
        name: {"ms": ms} for name, ms in (("one-gpu", 8.0), ("ours", 5.0), ("zigzag", 6.0), ("all-to-all", 10.0))
    }
    rows["context-parallel"] = {"left_out": "no"}
    compare(rows, problem)
    assert rows["ours"] == {"ms": 5.0, "efficiency": 0.8, "best_peer": "zigzag", "of_best_peer": 5 / 6}
    assert rows["zigzag"] == {"ms": 6.0, "efficiency": 8 / 2 / 6} and rows["one-gpu"]["efficiency"] == 0.5


def test_fewer_steps_are_made_where_they_take_long() -> None:
    assert Turns(8, 3, 5).at(2**14) == Turns(8, 3, 5) and Turns(8, 3, 5).at(2**15) == Turns(3, 3, 3)
    assert Turns(1, 2, 2).at(2**15) == Turns(1, 2, 2)


def test_times_are_taken_number_by_number() -> None:
    assert StepTime.each(max, [StepTime(1, 5, 3), StepTime(2, 4, 1)]) == StepTime(2, 5, 3)


def test_every_way_and_every_reason_can_be_printed() -> None:
    assert set(names_of("llama")) | set(names_of("longnet")) == set(MEANING)
    row = {"model": "llama", "mode": "eager", "tokens": 2048, "way": "ours"}
    assert table_line({**row, "left_out": "no GPU"}).endswith("left out: no GPU")
    times = {"ms": 1.0, "wall_ms": 2.0, "host_ms": 0.5, "peak_bytes": 2**30}
    assert table_line({**row, **times, "best_peer": "zigzag", "of_best_peer": 0.5}).endswith("0.500 of zigzag")
