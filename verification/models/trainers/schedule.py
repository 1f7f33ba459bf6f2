"""The schedule of learning rates: it falls linearly, so that a trainer that loses its place takes other steps."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR


def linear(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Return the schedule that transformers calls "linear", without warmup."""
    return LambdaLR(optimizer, lambda step: 1 - step / steps)


def follow(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.Optimizer:
    """Return the optimizer, which follows the schedule by itself: for the one process."""
    schedule = linear(optimizer, steps)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer
