"""Faults of checkpoints, in one process: damaged copies, foreign ones, full disks and folders of others."""

from __future__ import annotations

import atexit
import os
import random
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import nn

from ring.nn.frameworks import checkpoint, checkpoint_lock
from verification.faults.fault_experiment import MishandledFault

DAMAGE = {
    "flip": "a flipped bit",
    "zero": "a zeroed page",
    "cut": "a cut file",
    "swap": "a file of another step",
    "missing": "a missing file",
}
_PAGE = 512  # bytes: that of a small disk
Run = tuple[nn.Module, torch.optim.Optimizer]


def small_run(width: int = 8, dtype: torch.dtype = torch.float64, momentum: bool = False) -> Run:
    model = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8)).to(dtype)
    if momentum:
        return model, torch.optim.SGD(model.parameters(), momentum=0.5)
    return model, torch.optim.AdamW(model.parameters())


FOREIGN: dict[str, Callable[[], Run]] = {
    "wide": lambda: small_run(width=9),
    "float32": lambda: small_run(dtype=torch.float32),
    "momentum": lambda: small_run(momentum=True),
}


@cache
def stock() -> Path:
    """Return a folder of checkpoints to damage: steps 1 and 2 of a training, and one of each of FOREIGN."""
    folder = Path(tempfile.mkdtemp(prefix="ring-checkpoints-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for step in (1, 2):
        save(folder / str(step), small_run(), step)
    for name, run in FOREIGN.items():
        save(folder / name, run(), 1)
    return folder


def save(folder: Path, run: Run, step: int) -> None:
    with warnings.catch_warnings():  # torch warns of a single process
        warnings.simplefilter("ignore")
        checkpoint.save(folder, *run, step=step)


def refusal(folder: Path, run: Run) -> str | None:
    """Load a checkpoint, and return the text of its refusal; None if it was loaded.

    Raises MishandledFault if it raised another error, or changed the model before."""
    before = [x.detach().clone() for x in run[0].parameters()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
        other_manifest = kind == "swap" and file.name == "manifest.json"  # with which no file agrees
        if str(copy) not in text or (file.name not in text and not other_manifest):
            raise MishandledFault(f"misnamed: {DAMAGE[kind]}, {file.name}, got: {text}")

    return strike


def foreign(draw: random.Random, folder: Path) -> None:
    """Load a checkpoint into another model, dtype or optimizer, or the other way round."""
    name, forward = draw.choice(sorted(FOREIGN)), draw.random() < 0.5
    text = refusal(stock() / name, small_run()) if forward else refusal(stock() / "1", FOREIGN[name]())
    if text is None or " must have the " not in text:
        raise MishandledFault(f"{'silent' if text is None else 'misnamed'}: a checkpoint of others, {name}, got {text}")


def full_disk(draw: random.Random, folder: Path) -> None:
    """Save where no file may grow beyond a size that is below that of the largest."""
    most = draw.randrange(max(file.stat().st_size for file in (stock() / "1").iterdir()))
    try:
        with file_limit(most):
            save(folder / "3", small_run(), 3)
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


def held(draw: random.Random, folder: Path) -> None:
    """Take a folder twice."""
    with checkpoint_lock.hold(folder):
        try:
            with checkpoint_lock.hold(folder):
                raise MishandledFault("silent: a folder was held twice")
        except OSError as error:
            if f"held by process {os.getpid()} of " not in str(error):
                raise MishandledFault(f"misnamed: a folder that is held, got: {error}") from error


def taken(draw: random.Random, folder: Path) -> None:
    """Save where a checkpoint is."""
    copy = Path(shutil.copytree(stock() / "1", folder / "1"))
    try:
        save(copy, small_run(), 2)
    except ValueError:
        if (text := refusal(copy, small_run())) is not None:
            raise MishandledFault(f"lost: the checkpoint that was there: {text}") from None
    else:
        raise MishandledFault("silent: a checkpoint was saved over another")
