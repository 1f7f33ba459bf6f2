"""Checkpoints of trainings on several ranks, by `torch.distributed.checkpoint`: resumed on any number of ranks.

    with checkpoint.hold(folder):                                               # no other training saves here
        checkpoint.save(f"{folder}/1000", model, optimizer, step=1000)
        progress = checkpoint.load(f"{folder}/1000", model, optimizer)          # {"step": 1000}

Works for a plain model, DDP and FSDP2, and from one to another: tensors are stored whole, by name. Rank 0 writes them,
and needs memory for all; each rank reads its parts. A checkpoint holds no layout and no group: make the
`ContextParallel` handle for the current ranks. DeepSpeed and FairScale have checkpoints of their own.

A checkpoint exists whole or not at all: it is written into a hidden folder, read back, and renamed when all is on the
disk. manifest.json has a digest of state.pt, which `load` checks first. `load` runs no code that a file names.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from ring.comm.rank_error import described, error_of
from ring.whole_file import sync_folder, unwritten, write

FORMAT = 2
_MANIFEST, _STATE, _LOCK = "manifest.json", "state.pt", ".lock"
_LONGEST = 2**30  # bytes of a manifest
_HOLDER = 400  # bytes of a lock, which is overwritten in place
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
        progress: values that JSON gives back as they are: no tuples, no numbers of numpy, no keys but strings.

    Raises:
        ValueError, TypeError: the folder has files; `load` would refuse a value, or return another; a parameter or a
            value of the optimizer is NaN or infinite.
        OSError: a file cannot be written, named with the free space of its disk.
    """
    folder = Path(folder).absolute()

    def begin() -> None:
        for name, value in progress.items():
            if repr(again := json.loads(json.dumps(value))) != repr(value):
                raise ValueError(f"{name} must be a value that JSON gives back as it is, got {value!r} for {again!r}")
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

    def begin() -> dict[str, Any]:
        if not optimizer.state and any(x.grad is not None for group in optimizer.param_groups for x in group["params"]):
            raise ValueError(
                "optimizer must have no gradients when a checkpoint is loaded into it for the first time: load before "
                "backward, or call zero_grad()"
            )
        return _manifest(folder, whole=_rank() == 0)

    manifests, state = _everywhere(begin), _state(model, optimizer)
    own, saved = _places(state), dict[str, Place]()

    def read() -> None:
        if any(manifest["state"] != manifests[0]["state"] for manifest in manifests):
            raise ValueError(f"folder must hold the same checkpoint on every rank, got different ones in {folder}")
        saved.update(_places(whole := _read(folder / _STATE)))
        _check_kinds(saved, own)
        if _rank() == 0:
            _check_values(model, whole)

    _everywhere(read)
    for name, (container, key) in own.items():
        container[key] = _part(saved[name][0][saved[name][1]], container[key])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return manifests[_rank()]["progress"]


def read_progress(folder: str | Path, whole: bool = False) -> dict[str, Any]:
    """Return the progress of a checkpoint, and load nothing. No other rank needs to call it.

    Args:
        folder: of the checkpoint.
        whole: check the digest of the tensors too.

    Raises:
        ValueError: there is no checkpoint, or its manifest or its tensors are damaged.
    """
    return dict(_manifest(Path(folder), whole)["progress"])


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the folder until the end of the block, so that no other training saves there. Call it on every rank.

    The hold ends with this process, however that ends, and forked children do not share it. Removes the hidden folders
    of savings there that a kill cut short.

    Args:
        folder: that has, or will have, the folders of the checkpoints; made if it is missing.

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
        holder = _holder(os.pread(number, _HOLDER + 1, 0)) if own else None
        if holder is None:
            raise OSError(f"{file} must be a file that `checkpoint.hold` made, got another: remove it")
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since})
        os.pwrite(number, text.ljust(_HOLDER).encode(), 0)
    except BaseException as error:
        _let_go(locks)
        if isinstance(error, BlockingIOError):
            raise OSError(f"{folder} is held by {holder}: wait for its end, or name another folder") from None
        if isinstance(error, OSError) and error.errno:
            raise unwritten(file, error) from error
        raise
    for left in folder.iterdir():
        if _UNFINISHED.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
    return locks[0]


def _holder(text: bytes) -> str | None:
    """Return the holder in the text of a lock; None for a text of others."""
    try:
        held = json.loads(text or '{"process": "another"}')  # taken a moment ago
        return _printable(f"process {held['process']} of {held.get('host')} since {held.get('since')}")
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return None


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
    parameters, states = get_state_dict(model, optimizer)
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
    _check_types(state)
    _check_values(model, state)
    new = folder.with_name(f".checkpoint-{secrets.token_hex(8)}.new")
    try:
        new.mkdir(parents=True)
        with (new / _STATE).open("xb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        _read(new / _STATE)
        rest = json.dumps({"format": FORMAT, "progress": progress, "state": _entry(new / _STATE)})
        digest = hashlib.sha256(rest.encode()).hexdigest()
        write(new / _MANIFEST, f'{{"digest": "{digest}", {rest[1:]}\n')  # syncs the folder too
        _manifest(new, whole=False)
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
    """Return the state in a file, of which the pages are read when they are used. Raises ValueError."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        _places(state)
    except Exception as error:  # a pickle may raise whatever it likes
        raise ValueError(_printable(f"{file} is no state of a checkpoint: {type(error).__name__}: {error}")) from error
    return dict(state)


def _entry(file: Path) -> list[Any]:
    """Return size and digest of a file."""
    with file.open("rb") as stream:
        return [os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _manifest(folder: Path, whole: bool) -> dict[str, Any]:
    """Return the manifest of a checkpoint, with every field validated, and with the state's digest if whole.

    A digest finds damage. It is no signature: whoever can write the folder can write another manifest.
    """
    file, state = folder / _MANIFEST, folder / _STATE
    if not file.is_file():
        raise ValueError(f"folder must be a checkpoint of `checkpoint.save`, got {folder}, which has no {_MANIFEST}")
    with file.open("rb") as stream:
        content = stream.read(_LONGEST)
    head, rest = content[:79], b"{" + content[79:-1]  # {"digest": "64 digits", and the other fields
    try:
        data = json.loads(rest)
        if data["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {data['format']!r}: it is of another version")
        if head + content[-1:] != f'{{"digest": "{hashlib.sha256(rest).hexdigest()}", \n'.encode():
            raise ValueError("it does not agree with its own digest")
        if set(data) != {"format", "progress", "state"} or type(data["progress"]) is not dict:
            raise ValueError("fields must be format, progress and state")
        size, digest = data["state"]
        if (type(size), type(digest)) != (int, str):
            raise ValueError(f"state must be a size and a digest, got {data['state']!r}")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{file} is no manifest ({type(error).__name__}: {error})"
        raise ValueError(f"the checkpoint {folder} is damaged: {_printable(reason)}") from error
    if not state.is_file():
        raise ValueError(f"the checkpoint {folder} is damaged: {state} is missing")
    if state.stat().st_size != size or (whole and _entry(state)[1] != digest):
        raise ValueError(
            f"the checkpoint {folder} is damaged: {state}, of {state.stat().st_size} bytes, is not the file of "
            f"{size} bytes that was saved; take an earlier checkpoint"
        )
    return dict(data)


def _check_types(state: dict[str, Any]) -> None:
    """Raise ValueError for what torch would save, but not read without running code."""
    for name, (container, key) in _places(state).items():
        if isinstance(value := container[key], Tensor):
            continue
        try:
            content = io.BytesIO()
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
