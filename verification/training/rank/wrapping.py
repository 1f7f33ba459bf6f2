"""Wrappers that prepare a model for several ranks: one class each, with the same methods.

Activation checkpointing and wrapping use `ring.nn.frameworks`, as its documentation says. Every wrapper averages
gradients over all ranks, data x context, as the loss of `ring.nn` requires.
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

RECOMPUTED = "_checkpoint_wrapped_module."  # in parameter names of checkpointed layers


class TrainableModel:
    """A model with its optimiser. Without a wrapper, `ring.nn.average_gradients` averages its gradients."""

    def __init__(self, model: LanguageModel, case: TrainingCase) -> None:
        self.case, self.mesh = case, mesh_of(case)
        self.graphs = Graphs(case.compiled)
        self.compile_layers(model)
        if case.checkpointing != "none":
            selective, reentrant = case.checkpointing == "selective", case.checkpointing == "reentrant"
            recompute.wrap(model, LAYERS, keep_attention=selective, reentrant=reentrant)
        self.named = named_parameters(model)
        self.module = self.wrap(self.compile_model(model))
        self.optimiser = optimiser_of(case, self.named.values())

    def compile_layers(self, model: LanguageModel) -> None:
        """Compile each layer, if the wrapper needs that; called before checkpointing and wrapping."""

    def compile_model(self, model: LanguageModel) -> nn.Module:
        """Compile the whole model if the Case asks for it; called after checkpointing, before wrapping."""
        return self.graphs.compiled(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def logits(self, tokens: Tensor, positions: Tensor, context: ContextParallel) -> Tensor:
        """tokens (B, N), positions (N,) of this rank -> (B, N, vocabulary)."""
        with torch.autocast(self.case.device, torch.bfloat16, enabled=self.case.dtype == "bfloat16"):
            return self.module(tokens, positions, context)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Context of a micro-batch's forward and backward. last: True for the last one of the step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def end_of_backward(self) -> None:
        """Average gradients over all ranks; called after the last micro-batch."""
        if self.case.drops_zeros:
            for x in self.named.values():
                x.grad = x.grad if x.grad is not None and x.grad.any() else None
        average_gradients(self.named.values(), self.mesh)
        for x in self.named.values():  # parameters without gradient on any rank
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad

    def gradients(self) -> dict[str, Tensor]:
        """Return unsharded gradients by name. Collective. Raises ValueError for a parameter without gradient."""
        grads = {}
        for name, parameter in self.named.items():
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient")
            grads[name] = unsharded(parameter.grad)
        return grads

    def parameters(self) -> dict[str, Tensor]:
        """Return unsharded parameters by name. Collective."""
        return {name: unsharded(parameter) for name, parameter in self.named.items()}

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients; return the norm of all of them before clipping."""
        return clip_grad_norm(self.named.values(), max_norm, self.mesh)

    def wrongly_clipped(self, number: float) -> list[str]:
        """Parameters clipped otherwise than by torch when all gradients of the first are `number`, NaN or infinite. A
        norm of NaN makes all gradients NaN; an infinite norm makes finite ones 0."""
        wrong = []
        for index, x in enumerate(self.named.values()):
            x.grad = torch.full_like(x, 1.0 if index else number)
        norm = self.clip(1.0)
        for index, (name, x) in enumerate(self.named.items()):
            assert x.grad is not None
            grad = unsharded(x.grad)
            right = grad.isnan() if math.isnan(number) or not index else grad == 0.0  # infinity times 0 is NaN
            wrong += [] if bool(right.all()) else [name]
        return wrong if norm.isfinite().item() is False else [*wrong, "the norm"]

    def step(self) -> Tensor | None:
        """Clip if the Case asks for it, step, and clear the gradients. Returns the norm, or None without clipping."""
        norm = None if self.case.clipping is None else self.clip(self.case.clipping)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return norm


class Ddp(TrainableModel):
    """DistributedDataParallel over all ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return ddp.wrap(model, self.mesh)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if last else self.module.no_sync()

    def end_of_backward(self) -> None:
        """Do nothing: the last backward has averaged the gradients."""


class Fsdp(TrainableModel):
    """fully_shard of each layer and of the model, over all ranks."""

    replicate: tuple[str, ...] = ()

    def compile_layers(self, model: LanguageModel) -> None:
        for layer in model.layers:
            layer.forward = self.graphs.compiled(layer.forward)

    def compile_model(self, model: LanguageModel) -> nn.Module:
        """Return the model: FSDP's hooks around each layer stay outside of graphs."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        fsdp.shard(model, self.mesh, LAYERS, policy=self.policy(), replicate=self.replicate)
        self.named = named_parameters(model)  # FSDP replaced them with sharded ones
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
        """Do nothing: the last backward has averaged the gradients."""


class HybridFsdp(Fsdp):
    """Sharded within a context group, replicated over the data ranks."""

    replicate = ("data",)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, without the prefixes of checkpointing."""
    return {name.replace(RECOMPUTED, ""): x for name, x in model.named_parameters()}


def unsharded(x: Tensor) -> Tensor:
    """Gather a DTensor; return other tensors as they are. Detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


Wrap = Callable[[LanguageModel, TrainingCase], TrainableModel]
_BY_NAME = {"none": TrainableModel, "ddp": Ddp, "fsdp2": Fsdp, "hsdp2": HybridFsdp}


def wrapped(model: LanguageModel, case: TrainingCase) -> TrainableModel:
    """Wrap the model with the Case's wrapper."""
    return _BY_NAME[case.wrapper](model, case)
