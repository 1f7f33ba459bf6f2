"""Checkpoints of a training on several ranks, over `torch.distributed.checkpoint`: resumed on any number of ranks.

    with checkpoint.hold(folder):                                               # no other training saves here
        checkpoint.save(f"{folder}/1000", model, optimizer, step=1000)
        progress = checkpoint.load(f"{folder}/1000", model, optimizer)          # {"step": 1000}

Works for a plain model, DDP and FSDP2, and from one to another. Every rank calls each function but `read_progress`; all
raise one error. A checkpoint exists whole or not at all: a hidden folder is renamed when all is on the disk. SHA256SUMS
has digests, which find damage; they are no signature. Loading runs no code that a file names.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
import pickle
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from ring.comm.rank_error import described, make_error
from verification.whole_file import sync_folder, unwritten

SUMS, PROGRESS, INDEX, LOCK = "SHA256SUMS", "progress.json", ".metadata", ".lock"
HOLDER = re.compile(rb"(process \d+ of [\w.-]+ since [\w:+-]+ *)?")
UNFINISHED = re.compile(r"\.checkpoint-[0-9a-f]{16}\.new")
NO_FILES = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
IN_AN_INDEX = re.compile(  # what torch's index of tensors, a pickle, may name
    r"torch\.(Size|serialization\._get_layout|distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.(Metadata|"
    r"MetadataIndex|(Chunk|Tensor)StorageMetadata|StorageMeta|TensorProperties|_MEM_FORMAT_ENCODING)))|pathlib\.PosixPath"
)
DTYPES = {name for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
T = TypeVar("T")


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Save parameters, buffers, the optimizer's state and progress: numbers, text, and lists and dicts of them.

    The folder must be new, on a file system that all ranks share. Raises ValueError for a value that would not come
    back, and for NaN and +inf in progress, a parameter or the optimizer; OSError, with the free space, for a full disk.
    """
    folder = Path(folder).absolute()
    new = _gathered(folder.with_name(f".checkpoint-{secrets.token_hex(8)}.new"))[0]

    def write() -> None:
        with _naming(lambda error: unwritten(folder, error)):
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(new))  # of all ranks, when it returns on rank 0
            if _rank() == 0:
                _finish(new, folder, text)

    tensors, text = _everywhere(lambda: _checked(folder, model, optimizer, progress))
    try:
        _everywhere(write)
    finally:
        if _rank() == 0:
            shutil.rmtree(new, ignore_errors=True)  # exists after an error only


@torch.no_grad()
def _checked(folder: Path, model: nn.Module, optimizer: Any, progress: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a checkpoint, and the rest as JSON. Raises ValueError for what is not to be saved."""
    if _rank() == 0 and os.path.lexists(folder):
        raise ValueError(f"folder must be new, got {folder}, which exists: take a new folder for each checkpoint")
    _, states, tensors = _state(model, optimizer)
    changing = {name: x for name, x in tensors.items() if name.startswith("optimizer.")}  # no buffers of the model
    for name, x in {**dict(model.named_parameters()), **changing}.items():
        local = x.to_local() if isinstance(x, DTensor) else x
        numbers = torch.view_as_real(local) if local.is_complex() else local
        if numbers.is_floating_point() and not (numbers < math.inf).all():  # -inf may be that of a sink
            raise ValueError(f"{name} of the checkpoint must have no NaN and no inf, got some: keep the one before it")
    groups = [{k: list(x) if isinstance(x, tuple) else x for k, x in own.items()} for own in states["param_groups"]]
    for owner, values in (("progress", progress), *((f"optimizer.group {n}", own) for n, own in enumerate(groups))):
        for name, value in values.items():
            try:
                text = json.dumps(value, allow_nan=False)
                json.loads(f"{'[' * 99}{text}{']' * 99}")  # a reader may be called from deeper functions
                if json.loads(text) != value:
                    raise TypeError("it would come back as another")
            except (ValueError, TypeError, RecursionError) as error:
                allowed = "numbers of Python but NaN and inf, text, and lists and dicts of them with text as keys"
                raise ValueError(f"{owner}.{name} must be {allowed}, got {type(value).__name__}: {error}") from error
    return tensors, json.dumps({"progress": progress, "groups": groups})


def _finish(new: Path, folder: Path, text: str) -> None:
    """Write the other files of a checkpoint, and rename its hidden folder when all is on the disk."""
    _Reader(new).read_metadata()  # the next load can: all ranks share the folder, and this torch has no other index
    for name, content in ((PROGRESS, lambda: text), (SUMS, lambda: _sums(new, os.listdir(new)))):
        with (new / name).open("x") as stream:
            stream.write(content())
            stream.flush()
            os.fsync(stream.fileno())
    sync_folder(new)
    new.rename(folder)
    sync_folder(folder.parent)
    sync_folder(folder.parent.parent)  # the parent may be new


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the progress of a checkpoint, after loading the rest into a model and an optimizer, new or in use.

    Raises ValueError for what is no checkpoint, a damaged file, another model or optimizer, even if torch would load
    the part that fits; and for gradients beside a new optimizer, since torch would load nothing into it.
    """
    reader = _Reader(folder := Path(folder))

    def begin() -> tuple[Any, Any, dict[str, Tensor], Any, str]:
        if not optimizer.state and any(x.grad is not None for group in optimizer.param_groups for x in group["params"]):
            raise ValueError("optimizer must be loaded before backward if it is new, got gradients: call zero_grad()")
        sums, content = _read(folder, whole=_rank() == 0)
        parameters, states, tensors = _state(model, optimizer)
        index = reader.read_metadata().state_dict_metadata
        there = {name: f"{x.properties.dtype} {list(x.size)}" for name, x in index.items()}
        here = {name: f"{x.dtype} {list(x.shape)}" for name, x in tensors.items()}
        for groups, names in ((content["groups"], there), (states["param_groups"], here)):
            names |= {
                f"optimizer.group {n}": f"{sorted(own)!a} of {own.get('params')!a}" for n, own in enumerate(groups)
            }
        for name in sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
            differ = f"{name!a} is {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
            raise ValueError(f"{name.partition('.')[0]!a} must be that of the checkpoint {folder}: {differ}")
        return parameters, states, tensors, content, sums

    def read() -> None:
        with _naming(lambda error: ValueError(f"{folder} cannot be loaded: {type(error).__name__}: {str(error)!a}")):
            dcp.load(tensors, storage_reader=reader)

    parameters, states, tensors, content, sums = _everywhere(begin)
    if len(set(_gathered(sums))) > 1:
        raise ValueError(f"folder must hold the same checkpoint on every rank, got different ones in {folder}")
    _everywhere(read)
    for own, group in zip(states["param_groups"], content["groups"], strict=True):
        group |= {key: tuple(group[key]) for key, x in own.items() if isinstance(x, tuple)}
    loaded = {"state": states["state"], "param_groups": content["groups"]}
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=loaded)
    return cast(dict[str, Any], content["progress"])


def read_progress(folder: str | Path) -> dict[str, Any]:
    """Return the progress of a checkpoint, and load nothing. Raises ValueError if it is damaged or missing."""
    return cast(dict[str, Any], _read(Path(folder), whole=False)[1]["progress"])


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the folder of the checkpoints until the end of the block, so that no other training saves there.

    The hold ends with this process, however that ends; forked children do not share it. Makes the folder, and removes
    the hidden folders of savings that a kill cut short. Raises OSError with the process, host and time of its holder.
    """
    with ExitStack() as lock:
        _everywhere(lambda: lock.enter_context(_locked(Path(folder))) if _rank() == 0 else None)
        yield


def _locked(folder: Path) -> io.FileIO:
    folder.mkdir(parents=True, exist_ok=True)
    lock = _opened(folder / LOCK, os.O_RDWR | os.O_CREAT)
    os.register_at_fork(after_in_child=lock.close)  # an open copy would hold the folder
    try:
        holder = os.pread(lock.fileno(), 1000, 0)
        if os.fstat(lock.fileno()).st_nlink > 1 or not HOLDER.fullmatch(holder):
            raise OSError(f"{folder / LOCK} must be a file that `checkpoint.hold` made, got another: remove it")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.pwrite(
            lock.fileno(), f"process {os.getpid()} of {socket.gethostname()} since {since}".ljust(200).encode(), 0
        )
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            by = holder.decode().strip() or "another process"
            error = OSError(f"{folder} is held by {by}: wait for its end, or name another folder")
        raise (unwritten(folder / LOCK, error) if error.errno else error) from None
    for left in folder.iterdir():
        if UNFINISHED.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)  # removes no file and no link
    return lock


def _opened(file: Path, flags: int = os.O_RDONLY) -> io.FileIO:
    """Return an open file. Raises OSError for a link, a folder, a FIFO and a device, without waiting for it."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(mode := file.lstat().st_mode):
            raise OSError(f"{str(file)!a} must be a file, got {NO_FILES.get(stat.S_IFMT(mode), 'a device')}: remove it")
    return io.FileIO(os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+" if flags & os.O_RDWR else "r")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gathered(value: T) -> list[T]:
    """Return the value of each rank, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _everywhere(step: Callable[[], T]) -> T:
    """Return what the step returns on this rank; raise the first rank's error on all. Collective."""
    result, wrong = None, None
    try:
        result = step()
    except Exception as caught:  # of any type: the other ranks must raise it too
        if not dist.is_initialized():
            raise
        wrong = caught
    for rank, error in enumerate(_gathered(None if wrong is None else described(wrong))):
        if error is not None:
            raise make_error(rank, *error) from wrong
    return cast(T, result)


@contextmanager
def _naming(named: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Raise an error by its name; of torch's error of all ranks, which is no Exception, the part of this rank alone."""
    try:
        yield
    except OSError as error:
        raise named(error) from error
    except CheckpointException as error:
        if _rank() in error.failures:
            raise named(error.failures[_rank()][0]) from error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return torch's states of both, and their tensors by name. Raises ValueError for a value that is no tensor."""
    parameters, states = cast(tuple[dict[str, Any], dict[str, Any]], get_state_dict(model, optimizer))
    tensors = {f"model.{name}": x for name, x in parameters.items()}
    tensors |= {f"optimizer.{name}.{key}": x for name, own in states["state"].items() for key, x in own.items()}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}: make it one, or keep it in progress")
    return parameters, states, tensors


def _sums(folder: Path, names: Collection[str]) -> str:
    """Return the digests of files, as sha256sum prints them."""
    lines = []
    for name in sorted(set(names) - {SUMS}):
        with _opened(folder / name) as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def _read(folder: Path, whole: bool) -> tuple[str, dict[str, Any]]:
    """Return the digests and the progress of a checkpoint, if that, or the whole, has its digest. Raises ValueError."""
    try:
        if folder.is_symlink():
            raise OSError("it is a link")
        with _opened(folder / SUMS) as stream:
            sums = stream.read().decode()
        own = _sums(folder, os.listdir(folder) if whole else [PROGRESS])
        there = sums if whole else "".join(x for x in sums.splitlines(True) if x.endswith(f"  {PROGRESS}\n"))
        if own != there:
            names = {line[66:] for line in {*own.splitlines()} ^ {*there.splitlines()}} or {SUMS}
            raise ValueError(f"{SUMS} has not the digest of {sorted(names)!a}: take an earlier checkpoint")
        with _opened(folder / PROGRESS) as stream:
            content = json.loads(stream.read())
        return sums, {"progress": dict(content["progress"]), "groups": [dict(group) for group in content["groups"]]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder} is damaged, or no checkpoint of `checkpoint.save`: {error}") from error


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if IN_AN_INDEX.fullmatch(f"{module}.{name}") or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")


class _Reader(dcp.FileSystemReader):
    """Reads the files of the checkpoint alone, and runs no code that they name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with _opened(Path(self.path) / INDEX) as stream:
                index = _Index(stream).load()
            if others := {place.relative_path for place in index.storage_data.values()} - {*os.listdir(self.path)}:
                raise ValueError(f"it names {others}, which are not there: all ranks must share the folder")
            return index
        except Exception as error:  # a pickle may raise whatever it likes
            raise ValueError(f"{self.path} has no index of tensors: {type(error).__name__}: {str(error)!a}") from error
