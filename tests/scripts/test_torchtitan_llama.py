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


def numbers(folder: Path, ranks: int, *arguments: str) -> list[float]:
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = python(folder, *start, str(ROOT / "scripts/torchtitan_llama.py"), *arguments)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"\d+\.\d{12}", done.stdout)]


@pytest.mark.ranks
@pytest.mark.parametrize("packed", [(), pytest.param(("packed",), marks=pytest.mark.slow)])
def test_losses_and_norms_are_those_of_one_rank(packed: tuple[str, ...], tmp_path: Path) -> None:
    alone = numbers(tmp_path, 1, "1", *packed)
    assert len(alone) == 6
    for ranks in (2, 4) if packed else (4,):
        assert numbers(tmp_path, ranks, "2", *packed) == pytest.approx(alone, rel=1e-11)


@pytest.mark.ranks
def test_packed_documents_change_the_loss(tmp_path: Path) -> None:
    assert numbers(tmp_path, 2, "2", "packed")[0] != pytest.approx(numbers(tmp_path, 2, "2")[0], rel=1e-6)


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
