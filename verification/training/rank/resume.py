"""A run is saved and taken up by another one, as after a change of the number of ranks that share a sequence."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ring.nn.frameworks import checkpoint
from verification.training.rank.wrapping import Unwrapped


def resume(before: Unwrapped, after: Unwrapped, step: int) -> int:
    """Save what `before` has come to, and load it into `after`, which is new. Every rank calls it. Returns the number
    of steps that were done, as the checkpoint says."""
    with shared_folder() as folder:
        checkpoint.save(folder, before.module, before.optimiser, step=step)
        set_otherwise(after.optimiser)
        progress = checkpoint.load(folder, after.module, after.optimiser)
    return int(progress["step"])


def set_otherwise(optimiser: torch.optim.Optimizer) -> None:
    """Give it other numbers than the run had: a learning rate and so on that the checkpoint does not bring shows."""
    for group in optimiser.param_groups:
        for name, x in group.items():
            if name == "betas":
                group[name] = tuple(beta / 2 for beta in x)
            elif isinstance(x, (int, float)) and not isinstance(x, bool):
                group[name] = x / 2 + 0.25


@contextmanager
def shared_folder() -> Iterator[str]:
    """One for all ranks, while they use it. Every rank calls it."""
    names = [tempfile.mkdtemp(prefix="ring-checkpoint-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, src=0)
    try:
        yield names[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)
