"""Checkpoints that are damaged or hold what they must not: refused by name, on every rank.

`tests/verification/faults/test_training_faults.py` has drawn damage of files, other models, full disks and kills.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def forge(folder: Path, **changes: Any) -> None:
    """Write a manifest that agrees with its digest and with the state."""
    state = (folder / "state.pt").read_bytes()
    fields = {"format": 2, "progress": {}, "state": [len(state), hashlib.sha256(state).hexdigest()]} | changes
    forge_text(folder, json.dumps(fields))


def forge_text(folder: Path, rest: str) -> None:
    digest = hashlib.sha256(rest.encode()).hexdigest()
    (folder / "manifest.json").write_text(f'{{"digest": "{digest}", {rest[1:]}\n')


DEEP = '{"format": 2, "state": [], "progress": ' + '{"a":' * 100_000 + "1" + "}" * 100_001


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"format": 1}, "format must be 2, got 1"),
        ({"more\x1b[2J": 1}, "fields must be format, progress and state"),
        ({"progress": [7]}, "fields must be"),
        ({"state": [True, "a"]}, r"must be a size and a digest, got \[True"),
        ({"state": "\x1b[2J"}, "no manifest"),
        (DEEP, "RecursionError"),
        ("{\x1b[2J", "no manifest"),
        (None, "does not agree with its own digest"),
    ],
)
def test_every_field_of_a_manifest_is_checked(saved: Path, changes: Any, said: str) -> None:
    file = saved / "manifest.json"
    if changes is None:
        file.write_text(file.read_text().replace('"step": 7', '"step": 8'))
    else:
        forge_text(saved, changes) if isinstance(changes, str) else forge(saved, **changes)
    with pytest.raises(ValueError, match=said) as refused:
        checkpoint.read_progress(saved)
    assert str(refused.value).isprintable()


class Runs:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize(
    "state, said",
    [
        (Runs(), "no state of a checkpoint"),
        ({"model": {"\x1b[2J": torch.ones(1)}, "optimizer": {"state": {}, "param_groups": []}}, "x1b.2J is only in"),
        ({"model": []}, "no state of a checkpoint: TypeError|AttributeError|KeyError"),
    ],
)
def test_a_forged_state_runs_nothing_and_prints_no_controls(saved: Path, state: Any, said: str) -> None:
    torch.save(state, saved / "state.pt")
    forge(saved)
    with pytest.raises(ValueError, match=said) as refused:
        checkpoint.load(saved, *a_run())
    assert str(refused.value).isprintable()


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", ({1: 2, 10: 3}, {"a": (1, 2)}, [np.float64(0.5)], {None: 1}, Colour.RED, {1}, b"x"))
def test_progress_that_json_would_change_is_not_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="seen must be a value that JSON gives back|not JSON serial"):
        checkpoint.save(tmp_path / "1", *a_run(), seen=value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", (np.float64(0.5), np.int64(1), Colour.RED, {np.int64(1): 2}, [Path("x")], lambda: 1))
def test_options_that_torch_would_not_load_are_not_saved(tmp_path: Path, value: Any) -> None:
    model, optimizer = a_run()
    optimizer.param_groups[0]["mine"] = value
    with pytest.raises(ValueError, match="optimizer.group 0.mine must be a value that torch loads"):
        checkpoint.save(tmp_path / "1", model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ({1: 2}, {}, [[(1, 2), {"a": None}]], 1j, torch.float16, (0.5, 1)))
def test_options_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    (model, optimizer), (other, loaded) = a_run(), a_run(2.0)
    optimizer.param_groups[0]["mine"], loaded.param_groups[0]["mine"] = value, 7
    checkpoint.save(tmp_path / "1", model, optimizer)
    checkpoint.load(tmp_path / "1", other, loaded)
    assert repr(loaded.param_groups[0]["mine"]) == repr(value)


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


def test_two_savings_at_once_leave_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is writing."""
    entry = checkpoint._entry

    def entry_late(file: Path) -> list[Any]:
        monkeypatch.undo()
        checkpoint.save(tmp_path / "1", *a_run(2.0), by="second")
        return entry(file)

    monkeypatch.setattr(checkpoint, "_entry", entry_late)
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
        lambda file: file.write_text('{"a": ' * 60),
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
