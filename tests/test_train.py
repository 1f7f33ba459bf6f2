"""scripts/train.py: the same training on any number of ranks, also from a checkpoint of another number of ranks."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SMALL = "--tokens 64 --layers 1 --dim 16 --heads 2 --segment-length 16 64 --dilated-ratio 1 2 --dtype float64"
ONE_RANK = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments, *SMALL.split()]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def trained(folder: Path, arguments: str) -> Any:
    """The losses of all steps."""
    folder.mkdir(exist_ok=True)
    record = folder / "record.json"
    places = ("--folder", str(folder), "--json", str(record), "--every", "1")
    done = run("scripts/train.py", *places, *arguments.split())
    assert done.returncode == 0, done.stderr
    return json.loads(record.read_text())["losses"]


@pytest.mark.ranks
@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    wanted = trained(tmp_path / "alone", "--steps 4")
    trained(tmp_path / "shared", "--steps 2 --ranks 4 --data 2")
    found = trained(tmp_path / "shared", "--steps 4 --ranks 2 --resume")
    assert len(set(found)) == 4
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)


def test_data_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    done = run("scripts/train.py", "--ranks", "4", "--data", "3")
    assert done.returncode == 2
    assert "--data is 3; it must divide the 4 ranks and the batch of 2" in done.stderr


def test_no_step_sees_the_windows_that_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train = importlib.import_module("train")
    monkeypatch.setattr(train, "text", lambda name: torch.tensor([0] * 512 + [1] * 512, dtype=torch.uint8))
    options = argparse.Namespace(text="manual", tokens=64, batch=4, held_out=8, seed=1)
    training_text, held_out = train.split_text(options)
    assert held_out.shape == (8, 64) and held_out.all() and training_text.shape == (512,)
    assert not any(train.windows(step, options).any() for step in range(500))


@pytest.mark.ranks
@pytest.mark.slow
def test_both_patterns_are_trained_on_as_many_bytes_and_for_as_long(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    own = ("--seconds", "0.5", "--held-out", "2", "--every", "2", "--json", str(file))
    done = run(*ONE_RANK, "scripts/bench", "patterns", *own)
    assert done.returncode == 0, done.stderr
    dense, dilated = json.loads(file.read_text())["trainings"]
    assert (dense["segment_length"], dense["dilated_ratio"], dilated["segment_length"]) == ([64], [1], [16, 64])
    assert len(dense["losses"]) <= len(dilated["losses"])
    for training in (dense, dilated):
        assert len(training["losses"]) == len(training["seconds"]) == training["steps"]
        assert training["held_out"][-1]["step"] == training["steps"] and training["seconds"][-1] >= 0.5
