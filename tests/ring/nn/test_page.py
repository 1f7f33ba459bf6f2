"""The training step on the page of `ring.nn` runs, and its loss and norm are the same on every rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "ring/nn/README.md").read_text()


def test_it_names_every_module() -> None:
    modules = {path.stem for path in (ROOT / "ring/nn").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"^\*\*(\w+)\.\*\*", PAGE, re.MULTILINE)) == modules


@pytest.mark.ranks
@pytest.mark.slow
def test_the_training_step_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# train_step\.py.*?)```", PAGE, re.DOTALL)
    script = tmp_path / "train_step.py"
    script.write_text(example)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line.partition(", ")[2] for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(said) == 12 and len(set(said)) == 3, said
