"""FairScale's OSS and ShardedDDP on a rank, as the wrapper and optimizer of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import Tensor, nn

from ring.integrations import fairscale
from verification.models.recording import arrays, named_parameters
from verification.models.results import Named
from verification.models.setup import Run, recompute_layers
from verification.training.rank.own_setup import OwnSetup
from verification.training.rank.ring_model import LAYERS


class Sharded(OwnSetup):
    """Wrapped by `ring.integrations.fairscale`."""

    oss: Any

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        recompute_layers(model, LAYERS, run)
        kind, settings = self.case.optimizer
        wrapped, self.oss = fairscale.wrap(model, kind, self.mesh, **settings)
        return wrapped

    def optimizer(self, parameters: Sequence[nn.Parameter], run: Run) -> torch.optim.Optimizer:
        oss: torch.optim.Optimizer = self.oss
        return oss

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[object]:
        assert isinstance(model, ShardedDataParallel)
        return nullcontext() if last else model.no_sync()

    def reduce(self, model: nn.Module, run: Run) -> None:
        """Do nothing: the last backward has averaged the gradients."""

    def gradients(self, model: nn.Module) -> Named:
        """Broadcast each gradient from the only rank that has it, the one that steps its parameter. Collective."""
        shares = enumerate(self.oss.partition_parameters())
        owners = {x: rank for rank, groups in shares for group in groups for x in group["params"]}
        grads: dict[str, Tensor] = {}
        for name, parameter in named_parameters(model).items():
            grad = parameter.grad if owners[parameter] == dist.get_rank() else torch.empty_like(parameter)
            if grad is None:
                raise ValueError(f"{name} has no gradient")
            grads[name] = grad.detach().clone()
            dist.broadcast(grads[name], owners[parameter])
        return arrays(grads)

    def clip(self, model: nn.Module, run: Run) -> Tensor | None:
        return None if self.case.clipping is None else self.oss.clip_grad_norm(self.case.clipping)


class ShardedAsWritten(Sharded):
    """Default settings and the optimiser's `zero_grad()`, which by torch's default sets gradients to None. (FairScale's
    documentation calls the model's `zero_grad()`, which does not.)"""

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        recompute_layers(model, LAYERS, run)
        kind, settings = self.case.optimizer
        self.oss = OSS(model.parameters(), optim=kind, **settings)
        return ShardedDataParallel(model, self.oss)
