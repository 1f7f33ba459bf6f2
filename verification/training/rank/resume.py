"""Resumes a run from a checkpoint on another mesh, as after a change of the number of context ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from verification.models import checkpoints

Trained = tuple[nn.Module, torch.optim.Optimizer]


def resume(before: Trained, after: Trained) -> None:
    """Save the state of `before` and load it into `after`, which is new. Collective."""
    with shared_folder() as folder:
        checkpoints.save(folder, *before)
        scramble(after[1])
        checkpoints.load(folder, *after)


def scramble(optimiser: torch.optim.Optimizer) -> None:
    """Change its learning rate and other settings, so that a setting missing from the checkpoint shows."""
    for group in optimiser.param_groups:
        for name, x in group.items():
            if name == "betas":
                group[name] = tuple(beta / 2 for beta in x)
            elif isinstance(x, (int, float)) and not isinstance(x, bool):
                group[name] = x / 2 + 0.25


@contextmanager
def shared_folder() -> Iterator[str]:
    """A temporary folder for all ranks, deleted at the end. Collective."""
    paths = [tempfile.mkdtemp(prefix="ring-checkpoint-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths, src=0)
    try:
        yield paths[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(paths[0], ignore_errors=True)
