"""FairScale's OSS and ShardedDDP on a rank, with the methods of the other wrappers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import Tensor, nn

from ring.nn.frameworks import fairscale
from verification.training.inputs import optimiser_settings
from verification.training.rank.ring_model import LanguageModel
from verification.training.rank.wrapping import TrainableModel
from verification.training.training_case import TrainingCase


class Sharded(TrainableModel):
    """Wrapped by `ring.nn.frameworks.fairscale`."""

    def __init__(self, model: LanguageModel, case: TrainingCase) -> None:
        super().__init__(model, case)
        self.optimiser: Any = self.oss

    def wrap(self, model: nn.Module) -> nn.Module:
        kind, settings = optimiser_settings(self.case)
        wrapped, self.oss = fairscale.wrap(model, kind, self.mesh, **settings)
        return wrapped

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.module, ShardedDataParallel)
        return nullcontext() if last else self.module.no_sync()

    def end_of_backward(self) -> None:
        """Do nothing: the last backward has averaged the gradients."""

    def gradients(self) -> dict[str, Tensor]:
        """Broadcast each gradient from the only rank that has it, the one that steps its parameter. Collective."""
        shares = enumerate(self.oss.partition_parameters())
        owners = {x: rank for rank, groups in shares for group in groups for x in group["params"]}
        grads = {}
        for name, parameter in self.named.items():
            grad = parameter.grad if owners[parameter] == dist.get_rank() else torch.empty_like(parameter)
            if grad is None:
                raise ValueError(f"{name} has no gradient")
            grads[name] = grad.detach().clone()
            dist.broadcast(grads[name], owners[parameter])
        return grads

    def clip(self, max_norm: float) -> Tensor:
        return self.oss.clip_grad_norm(max_norm)


class ShardedAsWritten(Sharded):
    """Default settings and the optimiser's `zero_grad()`, which by torch's default sets gradients to None. (FairScale's
    documentation calls the model's `zero_grad()`, which does not.)"""

    def wrap(self, model: nn.Module) -> nn.Module:
        kind, settings = optimiser_settings(self.case)
        self.oss = OSS(model.parameters(), optim=kind, **settings)
        return ShardedDataParallel(model, self.oss)
