"""scripts/train.py: the same training on any number of ranks, also from a checkpoint of another number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = "--tokens 64 --layers 1 --dim 16 --heads 2 --segment-length 16 64 --dilated-ratio 1 2 --dtype float64 --every 1"


def trained(folder: Path, *arguments: str) -> list[float]:
    """The losses of all steps."""
    record = folder / "record.json"
    script = [sys.executable, str(ROOT / "scripts/train.py"), *SMALL.split()]
    command = [*script, "--folder", str(folder), "--json", str(record), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(record.read_text())["losses"]
    return losses


@pytest.mark.ranks
@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir()
    wanted = trained(alone, "--steps", "4")
    trained(shared, "--steps", "2", "--ranks", "4", "--data", "2")
    found = trained(shared, "--steps", "4", "--ranks", "2", "--resume")
    assert len(set(found)) == 4
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)


def test_data_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    command = [sys.executable, str(ROOT / "scripts/train.py"), "--ranks", "4", "--data", "3"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--data is 3; it must divide the 4 ranks and the batch of 2" in done.stderr
