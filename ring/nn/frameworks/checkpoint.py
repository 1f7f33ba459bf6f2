"""Distributed checkpoints, by `torch.distributed.checkpoint`: saved at one number of ranks, resumed at another.

    checkpoint.save(f"{folder}/1000", model, optimizer, step=1000)
    progress = checkpoint.load(f"{folder}/1000", model, optimizer)              # {"step": 1000}

Works for a plain model, DDP and FSDP2, and from one to another: parameters are stored by name, and each rank writes
and reads its shards. A checkpoint holds no layout and no group: make the `ContextParallel` handle for the current
ranks. DeepSpeed and FairScale have checkpoints of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Save parameters, buffers, the optimizer's state and progress. Call it on every rank.

    Args:
        folder: new, or without a checkpoint, on a file system that all ranks share.
        model, optimizer: to save.
        progress: any values that JSON can represent.

    Raises:
        ValueError, TypeError: the folder has a checkpoint; JSON cannot represent the progress.
    """
    if (Path(folder) / ".metadata").exists():
        raise ValueError(f"folder must hold no checkpoint, got {folder}, which has one: take a new folder for each")
    encoded = json.dumps(progress)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states, "progress": encoded}, checkpoint_id=folder)


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the progress of a checkpoint of `save`, after loading the rest. Call it on every rank.

    Args:
        folder: of the checkpoint.
        model: with the parameters of the checkpoint.
        optimizer: new or in use; its learning rate becomes that of the checkpoint.

    Raises:
        ValueError: a new optimizer's parameters have gradients, since torch would load nothing into it; or the
            checkpoint is of another model, even if torch would load the part that fits.
    """
    _check_gradients(optimizer)
    parameters, states = get_state_dict(model, optimizer)
    _check_names(folder, parameters)
    state = {"model": parameters, "optimizer": states, "progress": ""}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
    progress: dict[str, Any] = json.loads(str(state["progress"]))
    return progress


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    has_gradients = any(x.grad is not None for group in optimizer.param_groups for x in group["params"])
    if has_gradients and not optimizer.state:
        raise ValueError(
            "optimizer must have no gradients when a checkpoint is loaded into it for the first time: load before "
            "backward, or call zero_grad()"
        )


def _check_names(folder: str | Path, parameters: Iterable[str]) -> None:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {name.removeprefix("model.") for name in entries if name.startswith("model.")}
    expected = set(parameters)
    if saved != expected:
        raise ValueError(
            f"model must have the parameters of the checkpoint: {_first_names(saved - expected)} only in the "
            f"checkpoint, {_first_names(expected - saved)} only in the model"
        )


def _first_names(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return f"{first} and {len(names) - 3} more are" if len(names) > 3 else f"{first or 'nothing'} is"
