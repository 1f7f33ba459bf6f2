"""Checkpoints of trainings on several ranks, by `torch.distributed.checkpoint`: resumed on any number of ranks.

    with checkpoint.hold(folder):                                               # no other training saves here
        checkpoint.save(f"{folder}/1000", model, optimizer, step=1000)
        progress = checkpoint.load(f"{folder}/1000", model, optimizer)          # {"step": 1000}

Works for a plain model, DDP and FSDP2, and from one to another: tensors are stored whole, by name. Rank 0 writes them,
and needs memory for all; each rank reads its parts. A checkpoint holds no layout and no group: make the
`ContextParallel` handle for the current ranks. DeepSpeed and FairScale have checkpoints of their own.

A checkpoint exists whole or not at all: it is written into a hidden folder, read back, and renamed when all is on the
disk. SHA256SUMS has digests of its files, which `load` checks first. `load` runs no code that a file names.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import math
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from ring.comm.rank_error import described, error_of
from ring.whole_file import sync_folder, unwritten, write

_SUMS, _PROGRESS, _STATE, _LOCK = "SHA256SUMS", "progress.pt", "state.pt", ".lock"
_HOLDER = re.compile(rb'(process \d+ of [\w.-]+ since [\w:+-]+|{"host": "[\w.-]+", "process": \d+, [\w": +-]+}) *')
_UNFINISHED = re.compile(r"\.checkpoint-[0-9a-f]{16}\.new")
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")
_locks: set[io.FileIO] = set()
Place = tuple[Any, str]
Result = TypeVar("Result")


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Save parameters, buffers, the optimizer's state and progress. Call it on every rank.

    Args:
        folder: new or empty, on a file system that all ranks share. After an error it is as it was.
        model, optimizer: to save.
        progress: numbers, text, tensors, and containers of them; none of numpy.

    Raises:
        ValueError: the folder has files; `load` would refuse a value, which is named; a parameter or a value of the
            optimizer is NaN or infinite.
        OSError: a file cannot be written, named with the free space of its disk.
    """
    folder = Path(folder).absolute()

    def begin() -> None:
        for name, value in progress.items():
            _check_type(f"progress.{name}", value)
        if _rank() == 0 and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"folder must hold no checkpoint and no files, got {folder}: take a new folder for each")

    _everywhere(begin)
    state = _state(model, optimizer)
    for container, key in _places(state).values():
        container[key] = _whole(container[key])
    _everywhere(lambda: _write(folder, model, state, progress) if _rank() == 0 else None)


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the progress of a checkpoint of `save`, after loading the rest. Call it on every rank.

    Args:
        folder: of the checkpoint.
        model: with the parameters of the checkpoint.
        optimizer: new or in use; its learning rate becomes that of the checkpoint.

    Raises:
        ValueError: a file is damaged or missing, and which; a new optimizer's parameters have gradients, since torch
            would load nothing into it; or the checkpoint is of another model or optimizer, by a name, a dtype or a
            shape, even if torch would load the part that fits.
    """
    folder = Path(folder)

    def begin() -> bytes:
        if not optimizer.state and any(x.grad is not None for group in optimizer.param_groups for x in group["params"]):
            raise ValueError(
                "optimizer must have no gradients when a checkpoint is loaded into it for the first time: load before "
                "backward, or call zero_grad()"
            )
        return _checked(folder, (_PROGRESS, _STATE) if _rank() == 0 else (_PROGRESS,))

    sums, state = _everywhere(begin), _state(model, optimizer)
    own, saved, progress = _places(state), dict[str, Place](), dict[str, Any]()

    def read() -> None:
        if len(set(sums)) > 1:
            raise ValueError(f"folder must hold the same checkpoint on every rank, got different ones in {folder}")
        saved.update(_places(whole := _read(folder / _STATE)))
        progress.update(_read(folder / _PROGRESS))
        _check_kinds(saved, own)
        if _rank() == 0:
            _check_values(model, whole)

    _everywhere(read)
    for name, (container, key) in own.items():
        container[key] = _part(saved[name][0][saved[name][1]], container[key])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return progress


def read_progress(folder: str | Path, whole: bool = False) -> dict[str, Any]:
    """Return the progress of a checkpoint, and load nothing. No other rank needs to call it.

    Args:
        folder: of the checkpoint.
        whole: check the digest of the tensors too.

    Raises:
        ValueError: there is no checkpoint, or its progress or its tensors are damaged.
    """
    _checked(Path(folder), (_PROGRESS, _STATE) if whole else (_PROGRESS,))
    return _read(Path(folder) / _PROGRESS)


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the folder until the end of the block, so that no other training saves there. Call it on every rank.

    The hold ends with this process, however that ends, and forked children do not share it. Removes the hidden folders
    of savings there that a kill cut short.

    Args:
        folder: that has, or will have, the folders of the checkpoints; made if it is missing.

    Returns:
        a context manager, without a value.

    Raises:
        OSError: another process holds it, named with its host, number and time; or it cannot be written.
    """
    locks: list[io.FileIO] = []
    try:
        _everywhere(lambda: locks.append(_take(Path(folder))) if _rank() == 0 else None)
        yield
    finally:
        _let_go(locks)


def _take(folder: Path) -> io.FileIO:
    folder.mkdir(parents=True, exist_ok=True)
    file, locks = folder / _LOCK, list[io.FileIO]()
    try:
        # Never truncated: it may be of others, and a link leads anywhere.
        number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        locks.append(io.FileIO(number, "r+"))
        _locks.add(locks[0])
        status = os.fstat(number)
        own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        holder = os.pread(number, 1000, 0) if own else b"?"
        if holder and not _HOLDER.fullmatch(holder):
            raise OSError(f"{file} must be a file that `checkpoint.hold` made, got another: remove it")
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.pwrite(number, f"process {os.getpid()} of {socket.gethostname()} since {since}".ljust(200).encode(), 0)
    except BaseException as error:
        _let_go(locks)
        if isinstance(error, BlockingIOError):
            by = holder.decode().strip() or "another process"
            raise OSError(f"{folder} is held by {by}: wait for its end, or name another folder") from None
        if isinstance(error, OSError) and error.errno:
            raise unwritten(file, error) from error
        raise
    for left in folder.iterdir():
        if _UNFINISHED.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
    return locks[0]


def _let_go(locks: Collection[io.FileIO]) -> None:
    for lock in tuple(locks):
        _locks.discard(lock)
        lock.close()


os.register_at_fork(after_in_child=lambda: _let_go(_locks))  # an open copy would hold the folder


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _everywhere(step: Callable[[], Result]) -> list[Result]:
    """Return what the step returns on each rank, in rank order; raise the first rank's error on all. Collective."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return [step()]
    answer: Any
    try:
        answer = step(), None
    except Exception as wrong:  # of any type: the other ranks must raise it too
        answer = None, described(wrong)
    answers = [answer] * world
    dist.all_gather_object(answers, answer)
    for number, (_, error) in enumerate(answers):
        if error is not None:
            raise error_of(number, *error)
    return [value for value, _ in answers]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return both states in containers of their own: torch's are those that the optimizer uses."""
    parameters, states = cast(tuple[dict[str, Any], dict[str, Any]], get_state_dict(model, optimizer))
    known = {name: dict(own) for name, own in states["state"].items()}
    groups = [dict(group) for group in states["param_groups"]]
    return {"model": dict(parameters), "optimizer": {"state": known, "param_groups": groups}}


def _places(state: dict[str, Any]) -> dict[str, Place]:
    """Return the container and the key of each value, by name."""
    places = {f"model.{key}": (state["model"], key) for key in state["model"]}
    for name, known in state["optimizer"]["state"].items():
        places |= {f"optimizer.{name}.{key}": (known, key) for key in known}
    for number, group in enumerate(state["optimizer"]["param_groups"]):
        places |= {f"optimizer.group {number}.{key}": (group, key) for key in group}
    return places


def _whole(value: object) -> object:
    """Return a value of all ranks on rank 0; any other rank takes part only. Collective."""
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().cpu() if isinstance(tensor, Tensor) and _rank() == 0 else tensor


def _part(saved: object, own: object) -> object:
    """Return this rank's part of a saved value, a tensor in the place of its own."""
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor):
        return saved
    if isinstance(own, DTensor):
        saved = distribute_tensor(saved.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    with torch.no_grad():
        return own.copy_(saved)


def _write(folder: Path, model: nn.Module, state: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write both files into a folder beside the checkpoint's, read them, and rename it when all is on the disk."""
    for name, (container, key) in _places(state).items():
        _check_type(name, container[key])
    _check_values(model, state)
    new = folder.with_name(f".checkpoint-{secrets.token_hex(8)}.new")
    try:
        new.mkdir(parents=True)
        for name, content in ((_PROGRESS, progress), (_STATE, state)):
            with (new / name).open("xb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            _read(new / name)
        write(new / _SUMS, "".join(_sum(new / name) for name in (_PROGRESS, _STATE)))  # syncs the folder too
        new.rename(folder)
        sync_folder(folder.parent)
        sync_folder(folder.parent.parent)  # the parent may be new
    except Exception as error:
        cause: BaseException | None = error  # torch's zip writer raises an error of its own after the disk's
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None or not cause.errno:
            raise
        raise unwritten(folder, cause) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)  # exists after an error only


def _read(file: Path) -> dict[str, Any]:
    """Return the contents of a file, of which the pages are read when they are used. Raises ValueError."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if file.name == _STATE:
            _places(content)
        return dict(content)
    except Exception as error:  # a pickle may raise whatever it likes
        raise ValueError(_printable(f"{file} is of no checkpoint: {type(error).__name__}: {error}")) from error


def _sum(file: Path) -> str:
    with file.open("rb") as stream:
        return f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {file.name}\n"


def _checked(folder: Path, names: Collection[str]) -> bytes:
    """Return the digests of a checkpoint, of which these files have theirs. A digest finds damage. It is no signature:
    whoever can write the folder can write other digests."""
    sums = folder / _SUMS
    if not sums.is_file():
        raise ValueError(f"folder must be a checkpoint of `checkpoint.save`, got {folder}, which has no {_SUMS}")
    with sums.open("rb") as stream:
        text = stream.read(1000)
    for file in (folder / name for name in names):
        if not file.is_file():
            raise ValueError(f"the checkpoint {folder} is damaged: {file} is missing")
        if _sum(file).encode() not in text.splitlines(keepends=True):
            raise ValueError(
                f"the checkpoint {folder} is damaged: {file}, of {file.stat().st_size} bytes, has not the digest in "
                f"{_SUMS}: take an earlier checkpoint"
            )
    return text


def _check_type(name: str, value: object) -> None:
    """Raise ValueError for what torch would save, but not read without running code."""
    try:
        content = io.BytesIO()
        if not isinstance(value, Tensor):
            torch.save(value, content)
            content.seek(0)
            torch.load(content, weights_only=True)
    except Exception as error:  # a pickle may raise whatever it likes
        given = f"{value!r} of {type(value)}: write a number of Python for one of numpy"
        raise ValueError(f"{name} must be a value that torch loads with weights_only=True, got {given}") from error


def _check_values(model: nn.Module, state: dict[str, Any]) -> None:
    """Raise ValueError for NaN and +inf in a parameter or the optimizer's state. -inf may be that of a sink."""
    own = {_WRAPPERS.sub("", name) for name, _ in model.named_parameters()}
    parameters = [(name, x) for name, x in state["model"].items() if _WRAPPERS.sub("", name) in own]
    states = [(f"{name}.{key}", x) for name, known in state["optimizer"]["state"].items() for key, x in known.items()]
    for name, x in (*parameters, *states):
        values = torch.view_as_real(x) if isinstance(x, Tensor) and x.is_complex() else x
        if isinstance(x, Tensor) and (values.is_floating_point() and not (values < math.inf).all()):
            raise ValueError(f"{name} of the checkpoint must have no NaN and no inf, got some: keep the one before it")


def _check_kinds(saved: Mapping[str, Place], own: Mapping[str, Place]) -> None:
    """Raise ValueError for names, dtypes and shapes that are not those of the checkpoint."""
    for owner, what in (("model", "parameters"), ("optimizer", "states")):
        there, here = (
            {name.removeprefix(f"{owner}."): _kind(*x) for name, x in places.items() if name.startswith(f"{owner}.")}
            for places in (saved, own)
        )
        if there.keys() != here.keys():
            raise ValueError(
                f"{owner} must have the {what} of the checkpoint: {_first_names(there.keys() - here.keys())} only in "
                f"the checkpoint, {_first_names(here.keys() - there.keys())} only in the {owner}"
            )
        for name, kind in there.items():
            if here[name] != kind:
                raise ValueError(
                    f"{owner} must have the dtypes and shapes of the checkpoint: "
                    f"{_printable(f'{name} is {kind} there, {here[name]} in the {owner}')}"
                )


def _kind(container: Any, key: str) -> str:
    """Return dtype and shape of a tensor; the names of a group's parameters; no more of an option."""
    value = container[key]
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"of {value}" if key == "params" else "a value"


def _first_names(names: Collection[str]) -> str:
    first = _printable(", ".join(sorted(names)[:3]))
    return f"{first} and {len(names) - 3} more are" if len(names) > 3 else f"{first or 'nothing'} is"


def _printable(text: str) -> str:
    """Return the text in a line, with escapes for characters that would act on a terminal."""
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in " ".join(text.split())[:1000])
