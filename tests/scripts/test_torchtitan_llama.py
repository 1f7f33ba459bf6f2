"""A Llama of torchtitan over data x context: the same losses and norms as on one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv/torchtitan"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert PACKAGES.is_dir(), "scripts/test installs requirements-torchtitan.txt there"
    environment = os.environ | {"PYTHONPATH": f"{PACKAGES}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def numbers(folder: Path, ranks: int, context: int) -> list[float]:
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = python(folder, *start, str(ROOT / "scripts/torchtitan_llama.py"), str(context))
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"\d+\.\d{12}", done.stdout)]


@pytest.mark.ranks
def test_losses_and_norms_are_those_of_one_rank(tmp_path: Path) -> None:
    alone, sharded = numbers(tmp_path, 1, 1), numbers(tmp_path, 4, 2)
    assert len(alone) == 6 and sharded == pytest.approx(alone, rel=1e-11)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "status", "said"),
    [
        ("scripts.torchtitan_llama:Llama", "1,2", 0, "all held"),
        ("scripts.torchtitan_llama:Llama", "4", 0, "all held"),
        ("tests.support.torchtitan_defect:LocalPositions", "2", 1, "the model is called with other positions"),
    ],
)
def test_drawn_steps_are_those_of_torchtitans_attention(
    tmp_path: Path, name: str, world: str, status: int, said: str
) -> None:
    where = ("--world", world, "--examples", "15", "--seed", "1", "--failures", "kept")
    done = python(tmp_path, "verification", "model", name, *where)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in " ".join(done.stdout.split())
