"""Checkpoints that are damaged or hold what they must not: refused by name, on every rank.

`tests/verification/faults/test_training_faults.py` has drawn damage of files, other models, full disks and kills.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring.nn.frameworks import checkpoint
from tests.support.framework_example import optimizer_for
from tests.support.ranks import Ranks
from verification.faults.checkpoint_faults import file_limit

pytestmark = pytest.mark.ranks
Run = tuple[nn.Module, torch.optim.Optimizer]


def a_run(value: float = 1.0) -> Run:
    model = nn.Linear(3, 2, dtype=torch.float64)
    for x in model.parameters():
        nn.init.constant_(x, value)
    return model, optimizer_for(model)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "7", *a_run(), step=7)
    return tmp_path / "7"


def forge(folder: Path, name: str, content: object) -> None:
    """Put a file into a checkpoint, and its digest too."""
    torch.save(content, folder / name)
    sums = "".join(checkpoint._sum(folder / other) for other in ("progress.pt", "state.pt"))
    (folder / "SHA256SUMS").write_text(sums)


class Runs:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("state.pt", Runs(), "is of no checkpoint: UnpicklingError"),
        ("progress.pt", Runs(), "is of no checkpoint: UnpicklingError"),
        ("progress.pt", DEEP, "is of no checkpoint"),
        ("state.pt", {"model": []}, "is of no checkpoint"),
        ("state.pt", {"model": {"\x1b[2J": 1}, "optimizer": {"state": {}, "param_groups": []}}, "x1b.2J is only in"),
    ],
)
def test_a_forged_file_runs_nothing_and_prints_no_controls(saved: Path, name: str, content: Any, said: str) -> None:
    forge(saved, name, content)
    model, optimizer = a_run(2.0)
    with pytest.raises(ValueError, match=said) as refused:
        checkpoint.load(saved, model, optimizer)
    assert all((x == 2.0).all() for x in model.parameters())
    assert str(refused.value).isprintable()


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", (np.float64(0.5), np.int64(1), Colour.RED, {np.int64(1): 2}, [Path("x")], lambda: 1))
def test_a_value_that_torch_would_not_load_is_not_saved(tmp_path: Path, value: Any) -> None:
    model, optimizer = a_run()
    with pytest.raises(ValueError, match="progress.seen must be a value that torch loads"):
        checkpoint.save(tmp_path / "1", model, optimizer, seen=value)
    optimizer.param_groups[0]["mine"] = value
    with pytest.raises(ValueError, match="optimizer.group 0.mine must be a value that torch loads"):
        checkpoint.save(tmp_path / "1", model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ({1: 2, 10: 3, 2: None}, {}, [[(1, 2), {"a": {3}}]], 1j, torch.float16, (0.5, b"x")))
def test_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    (model, optimizer), (other, loaded) = a_run(), a_run(2.0)
    optimizer.param_groups[0]["mine"], loaded.param_groups[0]["mine"] = value, 7
    checkpoint.save(tmp_path / "1", model, optimizer, seen=value)
    progress = checkpoint.load(tmp_path / "1", other, loaded)
    assert repr(loaded.param_groups[0]["mine"]) == repr(progress["seen"]) == repr(value)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_no_number_is_neither_saved_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    with pytest.raises(ValueError, match="weight of the checkpoint must have no NaN and no inf"):
        checkpoint.save(tmp_path / "1", *a_run(value))
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_values", lambda *_: None)
        checkpoint.save(tmp_path / "1", *a_run(value))
    with pytest.raises(ValueError, match="must have no NaN and no inf"):
        checkpoint.load(tmp_path / "1", *a_run())


def _damaged_for_all(folder: Path) -> str:
    """The state is damaged, a disk is full, the folder is held: all ranks raise the same, and the group is of use."""
    texts = []
    rank = dist.get_rank()
    checkpoint.save(folder / "1", *a_run(), step=1)
    if rank == 0:
        content = bytearray((folder / "1" / "state.pt").read_bytes())
        content[999] ^= 1
        (folder / "1" / "state.pt").write_bytes(content)
    dist.barrier()
    with pytest.raises(ValueError, match="rank 0: .* is damaged: .*state.pt") as damaged:
        checkpoint.load(folder / "1", *a_run())
    texts.append(str(damaged.value))
    with file_limit(0 if rank == 0 else 10**9), pytest.raises(OSError, match="rank 0: cannot write .*/2") as full:
        checkpoint.save(folder / "2", *a_run())
    texts.append(str(full.value))
    held_by = pytest.raises(OSError, match="rank 0: .* is held by process")
    with checkpoint.hold(folder), held_by as held, checkpoint.hold(folder):
        pass
    texts.append(str(held.value))
    checkpoint.save(folder / "2", *a_run(), step=2)
    assert checkpoint.load(folder / "2", *a_run()) == {"step": 2}
    return "\n".join(texts)


def test_all_ranks_raise_the_error_of_one(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(2).run(_damaged_for_all, tmp_path)
    assert len(set(texts)) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "1", "2"]


def test_the_name_of_a_checkpoint_is_on_the_disk(tmp_path: Path) -> None:
    with patch.object(checkpoint, "sync_folder") as synced:
        checkpoint.save(tmp_path / "run" / "1", *a_run())
    assert [call.args[0] for call in synced.call_args_list] == [tmp_path / "run", tmp_path]


def test_two_savings_at_once_leave_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is writing."""
    real = checkpoint._sum

    def late(file: Path) -> str:
        monkeypatch.undo()
        checkpoint.save(tmp_path / "1", *a_run(2.0), by="second")
        return real(file)

    monkeypatch.setattr(checkpoint, "_sum", late)
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/1: Directory not empty"):
        checkpoint.save(tmp_path / "1", *a_run(1.0), by="first")
    model, optimizer = a_run(0.0)
    assert checkpoint.load(tmp_path / "1", model, optimizer) == {"by": "second"}
    assert all((x == 2.0).all() for x in model.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


HOLDER = """
import os, signal, sys, time
from ring.nn.frameworks import checkpoint
with checkpoint.hold(sys.argv[1]):
    os.mkdir(sys.argv[1] + "/.checkpoint-0123456789abcdef.new")
    child = os.fork()
    if not child:
        time.sleep(600)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_lock_names_its_holder_and_ends_before_its_children(tmp_path: Path) -> None:
    theirs = (".notes.new", ".checkpoint-0123456789abcdeg.new", ".step-1.0123abcd.new")
    for name in theirs:
        (tmp_path / name).mkdir()
    (tmp_path / ".checkpoint-0000000000000000.new").symlink_to(tmp_path / theirs[0])
    (tmp_path / ".checkpoint-0000000000000001.new").touch()  # it was of no saving, and blocks nothing
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with (
                pytest.raises(OSError, match=rf"{tmp_path} is held by process {holder.pid} of .* since 20"),
                checkpoint.hold(tmp_path),
            ):
                pass
            assert (tmp_path / ".checkpoint-0123456789abcdef.new").exists()
            holder.kill()
            holder.wait()
            with checkpoint.hold(tmp_path):
                names = {file.name for file in tmp_path.iterdir() if "checkpoint-00" not in file.name}
                assert names == {".lock", *theirs} and len(list(tmp_path.iterdir())) == 6
        finally:
            holder.kill()
            os.kill(child, 9)


def _hard_link(file: Path) -> None:
    file.with_name("mine").write_text("")
    file.hardlink_to(file.with_name("mine"))


@pytest.mark.parametrize(
    "make",
    [
        lambda file: file.symlink_to(shutil.copy(__file__, file.with_name("mine"))),
        _hard_link,
        lambda file: file.write_text("my notes"),
        Path.mkdir,
        os.mkfifo,
    ],
)
def test_a_lock_of_others_is_refused_and_stays(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / ".lock")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(OSError, match=r"\.lock"), checkpoint.hold(tmp_path):
        pass
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
