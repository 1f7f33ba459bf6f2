"""The optimizer of a StepCase."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from verification.models.step_case import StepCase


def optimiser_of(case: StepCase, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    kind, settings = optimiser_settings(case)
    return kind(parameters, **settings)


def optimiser_settings(case: StepCase) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the Case's optimizer, and its arguments."""
    if case.optimiser == "sgd":
        return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    # AdamW divides a gradient by its size, so the rounding of one near 0 would become a full step: eps bounds that.
    return torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
