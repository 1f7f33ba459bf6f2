"""Setups that a user may get wrong: each is refused, or reported, in a sentence that names the function."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference.pattern import Pattern
from ring.nn import ContextParallel, SelfAttention
from tests.support.model_examples import PlainModel, build
from verification.models import Setup

number = 7


def without_argument() -> nn.Module:
    return build(None)


def raises(context: ContextParallel | None) -> nn.Module:
    raise LookupError("no weights here")


def gives_none(context: ContextParallel | None) -> None:
    return None


def has_no_parameters(context: ContextParallel | None) -> nn.Module:
    return build(context).requires_grad_(False)


def gives_none_on_ranks(context: ContextParallel | None) -> nn.Module | None:
    return build(None) if context is None else None


def raises_on_ranks(context: ContextParallel | None) -> nn.Module:
    return build(None) if context is None else raises(context)


def hangs(context: ContextParallel | None) -> nn.Module:
    threading.Event().wait()
    return build(context)


def exits(context: ContextParallel | None) -> nn.Module:
    os._exit(3)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)


def pools(context: ContextParallel | None) -> nn.Module:
    return Pooled()


def of_few_tokens(context: ContextParallel | None) -> nn.Module:
    return nn.Embedding(5, 8)


class Dropping(PlainModel):
    """Drops by a function, and with `module` by a module."""

    def __init__(self, module: bool) -> None:
        super().__init__(False)
        self.dropouts = nn.ModuleList([nn.Dropout(0.0), nn.Dropout(0.01 * module)])

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel | None = None) -> Tensor:
        logits = super().forward(tokens, positions, context)
        return self.dropouts[1](logits) if self.dropouts[1].p else functional.dropout(logits, 0.01)


def drops(context: ContextParallel | None) -> nn.Module:
    return Dropping(False)


def has_dropout(context: ContextParallel | None) -> nn.Module:
    return Dropping(True)


def reseeds(context: ContextParallel | None) -> nn.Module:
    torch.seed()
    return build(context)


class WithoutContext(PlainModel):
    """A model of `ring.nn.SelfAttention` that makes no context of its own."""

    def __init__(self) -> None:
        super().__init__(False)
        self.own = SelfAttention(8, 2, Pattern.dense(causal=True))

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel | None = None) -> Tensor:
        return self.head(self.own(self.embedding(tokens), context))


def without_context(context: ContextParallel | None) -> nn.Module:
    return WithoutContext()


class LogitsOfOneToken(Setup):
    def build(self, context: ContextParallel | None) -> nn.Module:
        return build(context)

    def logits(self, *arguments: Any) -> Tensor:
        return super().logits(*arguments)[:, :1]


class LogitsRaise(LogitsOfOneToken):
    def logits(self, *arguments: Any) -> Tensor:
        raise LookupError("no logits")


class OnRanks(Setup):
    """Sound in one process."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return build(context)


class WithoutResult(OnRanks):
    def step(self, *arguments: Any) -> Any:
        super().step(*arguments)


class WithoutLogits(OnRanks):
    def step(self, model: nn.Module, optimizer: Any, batches: Any, run: Any) -> Any:
        return 0.0, None


class StepTooFew(OnRanks):
    def train(self, *arguments: Any) -> Any:
        return list(super().train(*arguments))[1:]


class WithoutResults(OnRanks):
    def train(self, *arguments: Any) -> Any:
        list(super().train(*arguments))


class WithoutLoss(OnRanks):
    def train(self, *arguments: Any) -> Any:
        return [None for _ in super().train(*arguments)]


class VectorLoss(OnRanks):
    def loss(self, model: nn.Module, part: Any, run: Any) -> Tensor:
        loss = super().loss(model, part, run)
        return loss if run.mesh is None else loss.expand(3)


class VectorLossAlone(OnRanks):
    def loss(self, *arguments: Any) -> Tensor:
        return super().loss(*arguments).expand(3)


class NoOptimizer(OnRanks):
    def optimizer(self, parameters: Any, run: Any) -> Any:
        return parameters if run.mesh is not None else super().optimizer(parameters, run)


class NoModuleWrapped(OnRanks):
    def wrap(self, model: nn.Module, run: Any) -> Any:
        return None


class StepRaises(OnRanks):
    def step(self, *arguments: Any) -> Any:
        raise LookupError("no step")


class StepExits(OnRanks):
    def step(self, *arguments: Any) -> Any:
        os._exit(3)


class StepHangs(OnRanks):
    def step(self, model: nn.Module, *arguments: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            torch.distributed.barrier()  # the other rank does not come
        return super().step(model, *arguments)


class ClaimsNothing(OnRanks):
    def claims(self, case: Any) -> None:
        return None
