"""Checkpoints that are damaged or hold what they must not: refused by name, on every rank.

`tests/verification/faults/test_training_faults.py` has drawn damage of files, other models and full disks.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring.nn.frameworks import checkpoint, checkpoint_lock, checkpoint_manifest
from ring.nn.frameworks.checkpoint_files import Reader
from tests.support.framework_example import optimizer_for
from tests.support.ranks import Ranks
from verification.faults.checkpoint_faults import file_limit

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
Run = tuple[nn.Module, torch.optim.Optimizer]


def a_run(value: float = 1.0, dtype: torch.dtype = torch.float64, width: int = 3) -> Run:
    model = nn.Linear(width, 2, dtype=dtype)
    for x in model.parameters():
        nn.init.constant_(x, value)
    return model, optimizer_for(model)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "7"
    checkpoint.save(folder, *a_run(), step=7)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "7"))


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder must be a checkpoint of `checkpoint.save`, got .*no manifest.json"):
        checkpoint.load(tmp_path, *a_run())


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"world": 0}, "world must be an integer of at least 1, got 0"),
        ({"world": True}, "world must be an integer of at least 1, got True"),
        ({"format": 2}, "format must be 1, got 2"),
        ({"more": 1}, "fields must be files, format, progress, tensors, world, got"),
        ({"progress": [7]}, "progress must be an object, got"),
        ({"files": {"../x": [1, "a"]}}, "files must have names within the folder"),
        ({"tensors": {"x": ["float64", "3"]}}, "tensors must have a dtype and a shape each"),
        ({"world": 2}, "does not agree with its own digest"),
    ],
)
def test_every_field_of_the_manifest_is_checked(copied: Path, changes: dict[str, Any], said: str) -> None:
    file = copied / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=said):
        checkpoint.read_progress(copied)


class Runs:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


def test_metadata_that_would_run_code_is_refused(copied: Path) -> None:
    file = copied / ".metadata"
    file.write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="it names builtins.exec, which no checkpoint has"):
        Reader(copied, ()).read_metadata()


def test_files_outside_of_the_manifest_are_not_read(copied: Path) -> None:
    with pytest.raises(ValueError, match="names files that the manifest does not have: __0_0.distcp"):
        Reader(copied, (".metadata",)).read_metadata()


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_no_number_is_neither_saved_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    with pytest.raises(ValueError, match="weight of the checkpoint must have no NaN and no inf"):
        checkpoint.save(tmp_path / "1", *a_run(value))
    assert files_of(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_values", lambda *_: None)
        checkpoint.save(tmp_path / "1", *a_run(value))
    with pytest.raises(ValueError, match="must have no NaN and no inf"):
        checkpoint.load(tmp_path / "1", *a_run())


def _damaged_for_all(folder: Path) -> str:
    """One rank's files are damaged, one rank's disk is full: all raise the same, and the group is of use."""
    texts = []
    rank = dist.get_rank()
    checkpoint.save(folder / "1", *a_run(), step=1)
    if rank == 0:
        flip(folder / "1" / "__0_0.distcp", 999)
    dist.barrier()
    with pytest.raises(ValueError, match="__0_0.distcp") as damaged:
        checkpoint.load(folder / "1", *a_run())
    texts.append(str(damaged.value))
    with file_limit(0 if rank == 1 else 10**9), pytest.raises(OSError, match="rank 1: cannot write .*/__1_0") as full:
        checkpoint.save(folder / "2", *a_run())
    texts.append(str(full.value))
    held_by = pytest.raises(OSError, match="rank 0: .* is held by process")
    with checkpoint_lock.hold(folder), held_by as held, checkpoint_lock.hold(folder):
        pass
    texts.append(str(held.value))
    checkpoint.save(folder / "2", *a_run(), step=2)
    assert checkpoint.load(folder / "2", *a_run()) == {"step": 2}
    return "\n".join(texts)


def test_all_ranks_raise_the_error_of_one(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(2).run(_damaged_for_all, tmp_path)
    assert len(set(texts)) == 1
    assert [file.name for file in files_of(tmp_path)] == [".lock", "1", "2"]


def test_two_savings_at_once_leave_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is writing."""
    entry, begun = checkpoint_manifest.entry, [False]

    def entry_late(file: Path) -> tuple[int, str]:
        if not begun[0]:
            begun[0] = True
            checkpoint.save(tmp_path / "1", *a_run(2.0), by="second")
        return entry(file)

    monkeypatch.setattr(checkpoint_manifest, "entry", entry_late)
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/1: Directory not empty"):
        checkpoint.save(tmp_path / "1", *a_run(1.0), by="first")
    model, optimizer = a_run(0.0)
    assert checkpoint.load(tmp_path / "1", model, optimizer) == {"by": "second"}
    assert all((x == 2.0).all() for x in model.parameters())
    assert [file.name for file in files_of(tmp_path)] == ["1"]


HOLDER = """
import os, signal, sys
from ring.nn.frameworks import checkpoint_lock
with checkpoint_lock.hold(sys.argv[1]):
    os.mkdir(sys.argv[1] + "/.5.abc.new")
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with (
                pytest.raises(OSError, match=rf"{tmp_path} is held by process {holder.pid} of .* since 20"),
                checkpoint_lock.hold(tmp_path),
            ):
                pass
            assert (tmp_path / ".5.abc.new").exists()
        finally:
            holder.kill()
    with checkpoint_lock.hold(tmp_path):
        assert [file.name for file in files_of(tmp_path)] == [".lock"]
