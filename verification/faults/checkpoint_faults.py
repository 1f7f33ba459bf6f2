"""Faults of checkpoints on one rank: damaged copies, foreign ones, full disks, kills, and folders of others."""

from __future__ import annotations

import atexit
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ring.nn.frameworks import checkpoint
from verification.faults.fault_experiment import MishandledFault

DAMAGE = {
    "flip": "a flipped bit",
    "zero": "a zeroed page",
    "cut": "a cut file",
    "swap": "a file of another step",
    "missing": "a missing file",
}
_PAGE = 512  # bytes: that of a small disk
_STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")  # of a saving, besides os.fsync
Run = tuple[nn.Module, torch.optim.Optimizer]


def small_run(width: int = 8, dtype: torch.dtype = torch.float64, momentum: bool = False) -> Run:
    model = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8)).to(dtype)
    if momentum:
        return model, torch.optim.SGD(model.parameters(), momentum=0.5)
    return model, torch.optim.AdamW(model.parameters())


FOREIGN: dict[str, dict[str, Any]] = {
    "wide": {"width": 9}, "float32": {"dtype": torch.float32}, "momentum": {"momentum": True},
}  # fmt: skip


@cache
def stock() -> Path:
    """Return a folder of checkpoints to damage: steps 1 and 2 of a training, and one of each of FOREIGN."""
    folder = Path(tempfile.mkdtemp(prefix="ring-checkpoints-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for step in (1, 2):
        checkpoint.save(folder / str(step), *small_run(), step=step)
    for name, options in FOREIGN.items():
        checkpoint.save(folder / name, *small_run(**options), step=1)
    return folder


def refusal(folder: Path, run: Run) -> str | None:
    """Load a checkpoint, and return the text of its refusal; None if it was loaded.

    Raises MishandledFault if it raised another error, or changed the model before."""
    before = [x.detach().clone() for x in run[0].parameters()]
    try:
        checkpoint.load(folder, *run)
    except Exception as error:  # torch raises whatever a damaged file leads to
        if not all(torch.equal(x, y) for x, y in zip(before, run[0].parameters(), strict=True)):
            raise MishandledFault(f"silent: the model was changed by a checkpoint that was refused: {error}") from error
        if not isinstance(error, ValueError):
            raise MishandledFault(
                f"misnamed: a refusal must be a ValueError, got {type(error).__name__}: {error}"
            ) from error
        return str(error)
    return None


def changed(kind: str, draw: random.Random, content: bytes, other: bytes) -> bytes:
    """Return the content of a damaged file. other: the same file of another step."""
    place = draw.randrange(8 * len(content))
    byte, page = place // 8, place // 8 // _PAGE * _PAGE
    size = min(_PAGE, len(content) - page)
    damaged = {"zero": content[:page] + bytes(size) + content[page + size :], "cut": content[:byte], "swap": other}
    if damaged.get(kind, content) != content:  # a page may be zero already
        return damaged[kind]
    return content[:byte] + bytes([content[byte] ^ 1 << place % 8]) + content[byte + 1 :]


def damaged_by(kind: str) -> Callable[[random.Random, Path], None]:
    """Return the strike of a kind of DAMAGE."""

    def strike(draw: random.Random, folder: Path) -> None:
        copy = Path(shutil.copytree(stock() / "1", folder / "1"))
        file = copy / draw.choice(sorted(path.name for path in copy.iterdir()))
        if kind == "missing":
            file.unlink()
        else:
            file.write_bytes(changed(kind, draw, file.read_bytes(), (stock() / "2" / file.name).read_bytes()))
        text = refusal(copy, small_run())
        if text is None:
            raise MishandledFault(f"silent: {DAMAGE[kind]}, {file.name}, was loaded")
        if str(copy) not in text or file.name not in text:
            raise MishandledFault(f"misnamed: {DAMAGE[kind]}, {file.name}, got: {text}")

    return strike


def foreign(draw: random.Random, folder: Path) -> None:
    """Load a checkpoint into another model, dtype or optimizer, or the other way round."""
    name, forward = draw.choice(sorted(FOREIGN)), draw.random() < 0.5
    options: dict[str, Any] = {} if forward else FOREIGN[name]
    text = refusal(stock() / (name if forward else "1"), small_run(**options))
    if text is None or " must have the " not in text:
        raise MishandledFault(f"{'silent' if text is None else 'misnamed'}: a checkpoint of others, {name}, got {text}")


def full_disk(draw: random.Random, folder: Path) -> None:
    """Save where no file may grow beyond a size that is below that of the largest."""
    most = draw.randrange(max(file.stat().st_size for file in (stock() / "1").iterdir()))
    try:
        with file_limit(most):
            checkpoint.save(folder / "3", *small_run(), step=3)
    except OSError as error:
        if str(folder) not in str(error) or "free on its disk" not in str(error):
            raise MishandledFault(f"misnamed: a file beyond {most} bytes, got: {error}") from error
    else:
        raise MishandledFault(f"silent: a checkpoint was saved with no file beyond {most} bytes")
    if left := sorted(path.name for path in folder.iterdir()):
        raise MishandledFault(f"left behind: {', '.join(left)}, by a saving with no file beyond {most} bytes")


@contextmanager
def file_limit(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def steps_until_lost(folder: Path, action: Callable[[], object], last: int = 0) -> int:
    """Take an action on a folder in a forked process, which loses its power before step `last`, and return the number
    of the steps that it began. New files without an fsync lose their contents, new folders their names."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    begun, busy, fsync = 0, False, os.fsync
    synced = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}

    def step(event: str, arguments: Any) -> None:
        nonlocal begun, busy
        if busy or event not in _STEPS or not str(arguments[0]).startswith(str(folder)):
            return
        begun, busy = begun + 1, True
        if begun == last:
            for path in sorted(folder.rglob("*"), reverse=True):
                if path.parent.stat().st_ino not in synced and path.is_file():
                    path.unlink()
                elif path.stat().st_ino not in synced and path.is_file():
                    os.truncate(path, 0)
            os._exit(begun)
        busy = False

    def sync(fd: Any) -> None:
        step("open", (folder,))
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    try:
        torch.set_num_threads(1)  # threads of the parent's pool do not exist here
        os.fsync = sync
        sys.addaudithook(step)
        action()
    finally:
        os._exit(begun)


def killed(draw: random.Random, folder: Path) -> None:
    """Lose the power between two steps of a saving, which has 19."""
    killed_at(folder, draw.randint(1, 20))


def killed_at(folder: Path, last: int) -> int:
    """Save a checkpoint, then remove the one before it, and lose the power before step `last` of that: one of both must
    be whole. Returns the number of steps that it began."""
    old = Path(shutil.copytree(stock() / "1", folder / "1"))

    def save() -> None:
        checkpoint.save(folder / "2", *small_run(), step=2)
        shutil.rmtree(old)

    begun = steps_until_lost(folder, save, last)
    with checkpoint.hold(folder):
        names = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    if not names or (text := refusal(folder / names[-1], small_run())) is not None:
        raise MishandledFault(f"lost: the checkpoint at step {last} of a saving: {text if names else 'there is none'}")
    if not set(names) <= {"1", "2"}:
        raise MishandledFault(f"left behind: {', '.join(names)} at step {last} of a saving")
    return begun


def held(draw: random.Random, folder: Path) -> None:
    """Take a folder twice."""
    with checkpoint.hold(folder):
        try:
            with checkpoint.hold(folder):
                raise MishandledFault("silent: a folder was held twice")
        except OSError as error:
            if f"held by process {os.getpid()} of " not in str(error):
                raise MishandledFault(f"misnamed: a folder that is held, got: {error}") from error


def taken(draw: random.Random, folder: Path) -> None:
    """Save where a checkpoint is."""
    copy = Path(shutil.copytree(stock() / "1", folder / "1"))
    try:
        checkpoint.save(copy, *small_run(), step=2)
    except ValueError:
        if (text := refusal(copy, small_run())) is not None:
            raise MishandledFault(f"lost: the checkpoint that was there: {text}") from None
    else:
        raise MishandledFault("silent: a checkpoint was saved over another")
