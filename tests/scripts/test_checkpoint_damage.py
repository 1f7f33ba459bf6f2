"""Checkpoints that are damaged, hold what they must not, or are cut short: refused by name on every rank, or whole."""

from __future__ import annotations

import enum
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import checkpoint
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.faults_of_disks import file_limit, steps_until_lost
from tests.support.framework_example import optimizer_for
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
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


def refused(folder: Path) -> str:
    """Return the text of a refusal, before which nothing was loaded."""
    model, optimizer = a_run(2.0)
    with pytest.raises(ValueError) as refusal:
        checkpoint.load(folder, model, optimizer)
    assert all((x == 2.0).all() for x in model.parameters()) and optimizer.param_groups[0]["lr"] == 0.01
    assert str(refusal.value).isprintable()
    return str(refusal.value)


def _link(file: Path) -> None:
    shutil.copy(file, file.parents[1] / "copy")
    file.unlink()
    file.symlink_to(file.parents[1] / "copy")


def _instead(make: Callable[[Path], object], file: Path) -> None:
    file.unlink()
    make(file)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "zeroed end": lambda file: file.write_bytes(file.read_bytes()[:-9] + bytes(9)),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "missing": Path.unlink,
    "link": _link,
    "FIFO": lambda file: _instead(os.mkfifo, file),
    "folder": lambda file: _instead(Path.mkdir, file),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ("__0_0.distcp", ".metadata", "progress.json", "SHA256SUMS"))
def test_damage_is_named_with_its_file(saved: Path, damage: str, name: str) -> None:
    DAMAGE[damage](saved / name)
    text = refused(saved)
    assert str(saved) in text and name in text and (damage not in ("link", "FIFO", "folder") or f"a {damage}" in text)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda folder: None, "No such file"),
        (Path.mkdir, "SHA256SUMS"),
        (Path.touch, "Not a directory"),
        (lambda folder: folder.symlink_to(folder.with_name("7")), "it is a link"),
        (lambda folder: (shutil.copytree(folder.with_name("7"), folder), (folder / "\x1b[2J").touch()), r"'\x1b[2J'"),
    ],
)
def test_malformed_checkpoints_are_refused(saved: Path, make: Callable[[Path], object], said: str) -> None:
    make(saved.with_name("8"))
    assert said in refused(saved.with_name("8"))


class Runs:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


def elsewhere(folder: Path) -> bytes:
    """Return an index whose tensors are in another folder."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = "../other"
    return pickle.dumps(index)


@pytest.mark.parametrize(
    "name, content, said",
    [
        (".metadata", lambda folder: pickle.dumps(Runs()), "builtins.exec is no part of an index"),
        (".metadata", elsewhere, "it names {'../other'}"),
        (".metadata", lambda folder: pickle.dumps({"\x1b": 1}), "has no index of tensors"),
        ("__0_0.distcp", lambda folder: b"\x1b" * 9999, "7 cannot be loaded: "),
        ("progress.json", lambda folder: b"[" * 100_000, "recursion"),
        ("progress.json", lambda folder: b"[]", "no checkpoint of `checkpoint.save`"),
        ("progress.json", lambda folder: b'{"progress": {}, "groups": [["params"]]}', "or no checkpoint of"),
        ("progress.json", lambda folder: b'{"progress": {}, "groups": []}', "'optimizer.group 0' is missing there"),
        ("progress.json", lambda folder: b'{"progress": {}, "groups": [{"params": "\\u001b"}]}', r"of '\x1b' there"),
    ],
)
def test_a_forged_file_runs_nothing(saved: Path, name: str, content: Callable[[Path], bytes], said: str) -> None:
    (saved / name).write_bytes(content(saved))
    (saved / "SHA256SUMS").write_text(checkpoint._sums(saved, os.listdir(saved)))
    assert said in refused(saved)


class Colour(enum.IntEnum):
    RED = 1


DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]
NAN = float("nan")


@pytest.mark.parametrize(
    "value",
    (NAN, [0.5, {"a": -float("inf")}], np.int64(1), np.float64(NAN), {1: 2}, [(1, 2)], b"x", 1j, Path("x"), DEEP, {3}),
)
def test_a_value_that_would_not_come_back_is_not_saved(tmp_path: Path, value: Any) -> None:
    model, optimizer = a_run()
    with pytest.raises(ValueError, match=r"progress\.seen must be numbers of Python but NaN and inf"):
        checkpoint.save(tmp_path / "1", model, optimizer, seen=value)
    optimizer.param_groups[0]["mine"] = value
    with pytest.raises(ValueError, match=r"optimizer\.group 0\.mine must be numbers"):
        checkpoint.save(tmp_path / "1", model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value", ({"1": 2, "b": None}, [[1, 2.5e-300], {"a": [True]}], "\ud800é\x00", Colour.RED, 2**70)
)
def test_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    (model, optimizer), (other, loaded) = a_run(), a_run(2.0)
    optimizer.param_groups[0] |= {"mine": value, "pair": (1, 2)}
    loaded.param_groups[0] |= {"mine": 7, "pair": (0, 0)}
    checkpoint.save(tmp_path / "1", model, optimizer, seen=value)
    progress = checkpoint.load(tmp_path / "1", other, loaded)
    assert loaded.param_groups[0]["mine"] == progress["seen"] == value
    assert loaded.param_groups[0]["pair"] == (1, 2)
    assert checkpoint.read_progress(tmp_path / "1") == progress


@pytest.mark.parametrize("value", (NAN, float("inf")))
def test_non_numbers_are_not_saved(tmp_path: Path, value: float) -> None:
    model, optimizer = a_run()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.state[model.get_parameter("bias")]["exp_avg"][1] = value
    for name, run in (("weight", a_run(value)), ("optimizer.bias.exp_avg", (model, optimizer))):
        with pytest.raises(ValueError, match=f"{name} of the checkpoint must have no NaN and no inf"):
            checkpoint.save(tmp_path / "1", *run)
    assert not list(tmp_path.iterdir())


def _damaged_for_all(folder: Path) -> str:
    """One rank has a bad value, a file is damaged, a disk is full, the folder is held: all ranks raise the same."""
    texts, rank = [], dist.get_rank()
    model, optimizer = a_run()
    optimizer.param_groups[0]["lr"] = NAN if rank == 1 else 0.5
    checkpoint.save(folder / "1", *a_run(), step=1)
    dist.barrier()
    if rank == 0:
        DAMAGE["flipped bit"](folder / "1" / "__1_0.distcp")
    dist.barrier()
    for kind, words, action in (
        (ValueError, "rank 1: optimizer.group 0.lr must be", lambda: checkpoint.save(folder / "2", model, optimizer)),
        (ValueError, "rank 0: .* is damaged.*__1_0.distcp", lambda: checkpoint.load(folder / "1", *a_run())),
        (OSError, "rank 1: cannot write .*/2: File too large", lambda: checkpoint.save(folder / "2", *a_run())),
    ):
        with file_limit(0 if rank == 1 and kind is OSError else 10**9), pytest.raises(kind, match=words) as refusal:
            action()
        texts.append(str(refusal.value))
    held_by = pytest.raises(OSError, match="rank 0: .* is held by process")
    with checkpoint.hold(folder), held_by as held, checkpoint.hold(folder):
        pass
    checkpoint.save(folder / "2", *a_run(), step=2)
    assert checkpoint.load(folder / "2", *a_run()) == {"step": 2}
    return "\n".join((*texts, str(held.value)))


def test_all_ranks_raise_the_error_of_one(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(2).run(_damaged_for_all, tmp_path)
    assert len(set(texts)) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "1", "2"]


@pytest.mark.parametrize("most", (0, 100, 1000, 5000))
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, most: int) -> None:
    said = rf"cannot write {tmp_path}/1: .*; [0-9,.]+ MiB are free on its disk"
    with file_limit(most), pytest.raises(OSError, match=said):
        checkpoint.save(tmp_path / "1", *a_run(), notes="x" * 9000)
    assert not list(tmp_path.iterdir())


def killed_at(folder: Path, last: int) -> int:
    """Save a checkpoint, then remove the one before it, and lose the power before a step of that: one of both must be
    whole, and nothing else be there. Returns the number of steps that it began."""
    checkpoint.save(folder / "1", *a_run(), step=1)

    def save() -> None:
        checkpoint.save(folder / "2", *a_run(), step=2)
        shutil.rmtree(folder / "1")

    begun = steps_until_lost(folder, save, last)
    with checkpoint.hold(folder):
        names = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    assert names and set(names) <= {"1", "2"}, names
    assert checkpoint.load(folder / names[-1], *a_run()) == {"step": int(names[-1])}
    return begun


def test_each_step_of_a_saving_can_be_its_last(tmp_path: Path) -> None:
    last = 1
    while killed_at(tmp_path / str(last), last) == last:
        last += 1
    assert last > 20


def nothing(*args: object) -> None: ...


@pytest.mark.parametrize(
    "name, without",
    [
        ("checkpoint.sync_folder", nothing),
        ("checkpoint.os", SimpleNamespace(**(vars(os) | {"fsync": nothing}))),
        ("checkpoint.dcp.FileSystemWriter", partial(dcp.FileSystemWriter, sync_files=False)),
    ],
)
def test_a_saving_without_an_fsync_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, without: object
) -> None:
    monkeypatch.setattr(name, without)
    with pytest.raises((ValueError, AssertionError)):
        for last in range(1, 40):
            killed_at(tmp_path / str(last), last)


def test_the_name_of_a_checkpoint_is_on_the_disk(tmp_path: Path) -> None:
    with patch.object(checkpoint, "sync_folder") as synced:
        checkpoint.save(tmp_path / "run" / "1", *a_run())
    assert [call.args[0] for call in synced.call_args_list][1:] == [tmp_path / "run", tmp_path]


def test_ranks_that_share_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_elsewhere(tensors: Any, storage_writer: Any, real: Any = dcp.save) -> None:
        real(tensors, storage_writer=storage_writer)
        (storage_writer.path / "__0_0.distcp").unlink()

    monkeypatch.setattr(checkpoint.dcp, "save", save_elsewhere)
    with pytest.raises(
        ValueError, match=r"names .'__0_0.distcp'., which are not there: all ranks must share the folder"
    ):
        checkpoint.save(tmp_path / "1", *a_run())
    assert not list(tmp_path.iterdir())


def test_two_savings_at_once_leave_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is writing."""
    real = checkpoint._sums

    def late(*arguments: Any) -> str:
        monkeypatch.undo()
        checkpoint.save(tmp_path / "1", *a_run(2.0), by="second")
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "_sums", late)
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/1: Directory not empty"):
        checkpoint.save(tmp_path / "1", *a_run(1.0), by="first")
    assert checkpoint.load(tmp_path / "1", *a_run(0.0)) == {"by": "second"}
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


SCRIPTS = Path(checkpoint.__file__).parent
HOLDER = """
import os, signal, sys, time
import checkpoint
with checkpoint.hold(sys.argv[1]):
    os.mkdir(sys.argv[1] + "/.checkpoint-0123456789abcdef.new")
    if not os.fork():
        print(os.getpid(), flush=True)  # by the child: it has closed its copy of the lock
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_locks_name_their_holder_and_end_before_children(tmp_path: Path) -> None:
    theirs = (".notes.new", ".checkpoint-0123456789abcdeg.new", ".step-1.0123abcd.new")
    for name in theirs:
        (tmp_path / name).mkdir()
    (tmp_path / ".checkpoint-0000000000000000.new").symlink_to(tmp_path / theirs[0])
    (tmp_path / ".checkpoint-0000000000000001.new").touch()  # it was of no saving, and blocks nothing
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    paths = os.pathsep.join(str(path) for path in (SCRIPTS, SCRIPTS.parent))
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
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
