"""Whole programs: those on the page of `ring.nn`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

ROOT = Path(__file__).parents[3]


def run(*words: str | Path, folder: Path = ROOT) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(ranks: int, folder: Path, program: str) -> str:
    script = folder / "program.py"
    script.write_text(program)
    return run("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script, folder=folder)


def test_training_step_is_equal_on_every_rank(tmp_path: Path) -> None:
    page = (ROOT / "ring/nn/README.md").read_text()
    (example,) = re.findall(r"```python\n(# train_step\.py.*?)```", page, re.DOTALL)
    lines = torchrun(4, tmp_path, example).splitlines()
    said = [line.partition(", ")[2] for line in lines if line.startswith("rank ")]
    assert len(said) == 12 and len(set(said)) == 3, said


def test_losses_equal_one_process(tmp_path: Path) -> None:
    page = (ROOT / "ring/nn/README.md").read_text()
    (example,) = re.findall(r"```python\n(# preferences\.py.*?)```", page, re.DOTALL)
    words = r"rank (\d): step (\d), (.*) and (.*), norm (.*)"
    alone, four = (re.findall(words, torchrun(ranks, tmp_path, example)) for ranks in (1, 4))
    wanted = {step: [float(number) for number in numbers] for _, step, *numbers in alone}
    assert len(wanted) == 3 and len(four) == 12
    for _, step, *numbers in four:  # printed with five digits; rounding of fp32 is less
        assert all(abs(float(x) - y) < 1e-4 for x, y in zip(numbers, wanted[step], strict=True))
