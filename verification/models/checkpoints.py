"""Checkpoints of a run, by `torch.distributed.checkpoint`: saved on some ranks, and loaded on others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save parameters, buffers and the optimizer's state. Collective."""
    dcp.save(_state(model, optimizer), checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load them into a model and an optimizer, both new. Collective."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, states = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": states}
