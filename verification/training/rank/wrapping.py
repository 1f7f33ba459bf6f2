"""How a model is made ready for several ranks: one class for each wrapper, all with the same few calls.

Layers are computed again, and models are wrapped, by the modules of `ring.nn.frameworks`, as users are told to.
Gradients are averaged over all ranks, data x context, by every wrapper; the loss of `ring.nn` counts on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ring.nn import ContextParallel, average_gradients, clip_grad_norm
from ring.nn.frameworks import ddp, fsdp, recompute
from verification.training.inputs import optimiser_of
from verification.training.rank.graphs import Graphs
from verification.training.rank.meshes import mesh_of
from verification.training.rank.ring_model import LAYERS, LanguageModel
from verification.training.training_case import TrainingCase

RECOMPUTED = "_checkpoint_wrapped_module."  # in the names of parameters of layers that are computed again


class Unwrapped:
    """The model as it is: gradients are averaged by `ring.nn.average_gradients`."""

    def __init__(self, model: LanguageModel, case: TrainingCase) -> None:
        self.case, self.mesh = case, mesh_of(case)
        self.graphs = Graphs(case.compiled)
        self.compile_layers(model)
        if case.checkpointing != "none":
            kept, reentrant = case.checkpointing == "selective", case.checkpointing == "reentrant"
            recompute.wrap(model, LAYERS, keep_attention=kept, reentrant=reentrant)
        self.named = named_parameters(model)
        self.module = self.wrap(self.compile_model(model))
        self.optimiser = optimiser_of(case, self.named.values())

    def compile_layers(self, model: LanguageModel) -> None:
        """Where the Case has it: before layers are computed again, and before the model is wrapped."""

    def compile_model(self, model: LanguageModel) -> nn.Module:
        """Where the Case has it: after the layers that are computed again, and before the model is wrapped."""
        return self.graphs.compiled(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def logits(self, tokens: Tensor, positions: Tensor, context: ContextParallel) -> Tensor:
        """tokens (B, N), positions (N,) of this rank -> (B, N, vocabulary)."""
        with torch.autocast(self.case.device, torch.bfloat16, enabled=self.case.dtype == "bfloat16"):
            return self.module(tokens, positions, context)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch. last: of the step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def end_of_backward(self) -> None:
        """After the last micro-batch: from now on gradients are those of the whole batch."""
        if self.case.drops_zeros:
            for x in self.named.values():
                x.grad = x.grad if x.grad is not None and x.grad.any() else None
        average_gradients(self.named.values(), self.mesh)
        for x in self.named.values():  # of which no rank had one
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad

    def gradients(self) -> dict[str, Tensor]:
        """By name, whole. Every rank calls it. Raises ValueError for a parameter without gradient."""
        found = {}
        for name, parameter in self.named.items():
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient")
            found[name] = whole(parameter.grad)
        return found

    def parameters(self) -> dict[str, Tensor]:
        """By name, whole. Every rank calls it."""
        return {name: whole(parameter) for name, parameter in self.named.items()}

    def clip(self, most: float) -> Tensor:
        """The norm of all gradients together, before they are clipped."""
        return clip_grad_norm(self.named.values(), most, self.mesh)

    def not_as_clipped(self, number: float) -> list[str]:
        """The parameters whose gradients are clipped otherwise than torch does it, where those of the first are all
        NaN, or infinite: NaN in a norm makes all of them NaN; an infinite norm makes finite ones 0."""
        wrong = []
        for place, x in enumerate(self.named.values()):
            x.grad = torch.full_like(x, 1.0 if place else number)
        norm = self.clip(1.0)
        for place, (name, x) in enumerate(self.named.items()):
            assert x.grad is not None
            found = whole(x.grad)
            right = found.isnan() if math.isnan(number) or not place else found == 0.0  # infinity times 0 is NaN
            wrong += [] if bool(right.all()) else [name]
        return wrong if norm.isfinite().item() is False else [*wrong, "the norm"]

    def step(self) -> Tensor | None:
        """Clips, where the Case has it, steps, and clears the gradients. Returns the norm, where there is clipping."""
        norm = None if self.case.clipping is None else self.clip(self.case.clipping)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return norm


class Ddp(Unwrapped):
    """DistributedDataParallel over all ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return ddp.wrap(model, self.mesh)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if last else self.module.no_sync()

    def end_of_backward(self) -> None:
        """DDP has averaged them within the last backward."""


class Fsdp(Unwrapped):
    """fully_shard of each layer and of the model, over all ranks."""

    replicate = False

    def compile_layers(self, model: LanguageModel) -> None:
        for layer in model.layers:
            layer.forward = self.graphs.compiled(layer.forward)

    def compile_model(self, model: LanguageModel) -> nn.Module:
        """What FSDP does around each layer is in no graph."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        fsdp.shard(model, self.mesh, LAYERS, policy=self.policy(), replicate=self.replicate)
        self.named = named_parameters(model)  # others than before, sharded
        return model

    def policy(self) -> MixedPrecisionPolicy:
        mixed = self.case.dtype == "bfloat16"
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()

    def logits(self, tokens: Tensor, positions: Tensor, context: ContextParallel) -> Tensor:
        return self.module(tokens, positions, context)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def end_of_backward(self) -> None:
        """FSDP has averaged them within the last backward."""


class HybridFsdp(Fsdp):
    """Sharded within a context group, replicated over the data ranks."""

    replicate = True


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By their names without the prefixes of wrappers."""
    return {name.replace(RECOMPUTED, ""): x for name, x in model.named_parameters()}


def whole(x: Tensor) -> Tensor:
    """A DTensor put together again; anything else as it is. Detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


Wrap = Callable[[LanguageModel, TrainingCase], Unwrapped]
_BY_NAME = {"none": Unwrapped, "ddp": Ddp, "fsdp2": Fsdp, "hsdp2": HybridFsdp}


def wrapped(model: LanguageModel, case: TrainingCase) -> Unwrapped:
    """As the Case has it."""
    return _BY_NAME[case.wrapper](model, case)
