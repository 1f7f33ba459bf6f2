"""The README is true: its example runs under torchrun, and the files that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.ranks
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# example\.py.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_named_is_there() -> None:
    named = set(re.findall(r"`?((?:reference|ring|verification|scripts|tests)/[\w./]*\w)", README))
    assert len(named) > 25
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
