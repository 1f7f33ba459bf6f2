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


def numbers(ranks: int, context: int) -> list[float]:
    environment = os.environ | {"PYTHONPATH": f"{PACKAGES}:{ROOT}", "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(ROOT / "scripts/torchtitan_llama.py"), str(context)]
    done = subprocess.run([*start, *script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"\d+\.\d{12}", done.stdout)]


@pytest.mark.ranks
def test_losses_and_norms_are_those_of_one_rank() -> None:
    assert PACKAGES.is_dir(), "scripts/test installs requirements-torchtitan.txt there"
    alone, sharded = numbers(1, 1), numbers(4, 2)
    assert len(alone) == 6 and sharded == pytest.approx(alone, rel=1e-11)
