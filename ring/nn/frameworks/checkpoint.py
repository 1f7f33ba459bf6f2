"""Distributed checkpoints, by `torch.distributed.checkpoint`: saved at one number of ranks, resumed at another.

    with checkpoint_lock.hold(folder):                                          # no other training saves here
        checkpoint.save(f"{folder}/1000", model, optimizer, step=1000)
        progress = checkpoint.load(f"{folder}/1000", model, optimizer)          # {"step": 1000}

Works for a plain model, DDP and FSDP2, and from one to another: parameters are stored by name, and each rank writes
and reads its shards. A checkpoint holds no layout and no group: make the `ContextParallel` handle for the current
ranks. DeepSpeed and FairScale have checkpoints of their own.

A checkpoint is there whole or not at all: it is written into a hidden folder, with a manifest (manifest.json) of a
digest of each file, and renamed when all is on the disk. `load` checks every digest first, and runs no code that a
file names.
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from ring.nn.frameworks import checkpoint_manifest
from ring.nn.frameworks.checkpoint_files import Planner, Reader, Writer
from ring.nn.frameworks.checkpoint_manifest import Manifest
from ring.nn.frameworks.checkpoint_ranks import everywhere, first_error, rank, world_size
from ring.whole_file import sync_folder, unwritten, write


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Save parameters, buffers, the optimizer's state and progress. Call it on every rank.

    Args:
        folder: new or empty, on a file system that all ranks share. After an error it is as it was.
        model, optimizer: to save.
        progress: any values that JSON can represent.

    Raises:
        ValueError, TypeError: the folder has files; JSON cannot represent the progress; a parameter or a value of the
            optimizer is NaN or infinite.
        OSError: a file cannot be written, named with the free space of its disk.
    """
    folder = Path(folder).absolute()
    parameters, states = get_state_dict(model, optimizer)
    tensors = _tensors(parameters, states)

    def begin() -> str:
        Manifest({}, {}, progress, 1).encoded()  # raises for what is no JSON
        _check_values(model, tensors)
        return _new_folder(folder) if rank() == 0 else ""

    new = Path(everywhere(begin)[0])
    try:
        with first_error():
            dcp.save({"model": parameters, "optimizer": states}, storage_writer=Writer(new))
        entries = everywhere(lambda: {file.name: checkpoint_manifest.entry(file) for file in _own_files(new)})
        files = {name: entry for own in entries for name, entry in own.items()}
        manifest = Manifest(files, _described(tensors), progress, world_size())
        everywhere(lambda: _finish(new, folder, manifest) if rank() == 0 else None)
    finally:
        if rank() == 0:
            shutil.rmtree(new, ignore_errors=True)  # is there after an error only


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

    def begin() -> tuple[str, Manifest]:
        _check_gradients(optimizer)
        manifest = checkpoint_manifest.read(folder)
        manifest.check_files(folder, sorted(manifest.files)[rank() :: world_size()])
        return manifest.encoded(), manifest

    texts, manifests = zip(*everywhere(begin), strict=True)
    manifest = manifests[rank()]
    parameters, states = get_state_dict(model, optimizer)
    tensors = _tensors(parameters, states)
    reader = Reader(folder, manifest.files)

    def compare() -> None:
        if len(set(texts)) > 1:
            raise ValueError(f"folder must hold the same checkpoint on every rank, got different ones in {folder}")
        _check_tensors(manifest.tensors, _described(tensors))
        reader.read_metadata()

    everywhere(compare)
    with first_error():
        dcp.load({"model": parameters, "optimizer": states}, storage_reader=reader, planner=Planner())
    everywhere(lambda: _check_values(model, tensors))
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
    return manifest.progress


def read_progress(folder: str | Path) -> dict[str, Any]:
    """Return the progress of a checkpoint, and load nothing. No other rank needs to call it.

    Args:
        folder: of the checkpoint.

    Raises:
        ValueError: there is no checkpoint, or its manifest is damaged.
    """
    return checkpoint_manifest.read(Path(folder)).progress


def _new_folder(folder: Path) -> str:
    """Make and return a folder beside the checkpoint's, with a name of its own for each saving."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder must hold no checkpoint and no files, got {folder}: take a new folder for each")
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise unwritten(new, error) from error
    return str(new)


def _own_files(new: Path) -> Iterator[Path]:
    yield from new.glob(f"__{rank()}_*")
    if rank() == 0:
        yield new / ".metadata"


def _finish(new: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest, then give the folder its name: torch has synced the other files."""
    write(new / checkpoint_manifest.NAME, manifest.encoded())
    try:
        new.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise unwritten(folder, error) from error


def _tensors(parameters: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the model and of the optimizer's state, by name."""
    named = {f"model.{name}": x for name, x in parameters.items()}
    for name, state in states["state"].items():
        named |= {f"optimizer.{name}.{key}": x for key, x in state.items()}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()}


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    has_gradients = any(x.grad is not None for group in optimizer.param_groups for x in group["params"])
    if has_gradients and not optimizer.state:
        raise ValueError(
            "optimizer must have no gradients when a checkpoint is loaded into it for the first time: load before "
            "backward, or call zero_grad()"
        )


def _check_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for NaN and +inf in a parameter or the optimizer's state. -inf may be that of a sink."""
    states = [(name, x) for name, x in tensors.items() if name.startswith("optimizer.")]
    for name, x in (*model.named_parameters(), *states):
        values = (x.to_local() if isinstance(x, DTensor) else x).detach()
        if values.is_floating_point() and not (values < math.inf).all():
            raise ValueError(f"{name} of the checkpoint must have no NaN and no inf, got some: keep the one before it")


def _check_tensors(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError for names, dtypes and shapes of tensors that are not those of the checkpoint."""
    for owner, what in (("model", "parameters"), ("optimizer", "states")):
        there, here = (
            {name.removeprefix(f"{owner}."): list(x) for name, x in tensors.items() if name.startswith(f"{owner}.")}
            for tensors in (saved, own)
        )
        if there.keys() != here.keys():
            raise ValueError(
                f"{owner} must have the {what} of the checkpoint: {_first_names(there.keys() - here.keys())} only in "
                f"the checkpoint, {_first_names(here.keys() - there.keys())} only in the {owner}"
            )
        for name, (dtype, shape) in there.items():
            if here[name] != [dtype, shape]:
                raise ValueError(
                    f"{owner} must have the dtypes and shapes of the checkpoint: {name} is {dtype} {shape} there, "
                    f"{here[name][0]} {here[name][1]} in the {owner}"
                )


def _first_names(names: Set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return f"{first} and {len(names) - 3} more are" if len(names) > 3 else f"{first or 'nothing'} is"
