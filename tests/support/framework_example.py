"""A training example for the tests of frameworks: what every rank is given, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ring import Layout
from ring.nn import Batch, ContextParallel, next_tokens, shard_batch
from tests.support.framework_llama import VOCABULARY, SmallLlama, dense_logits

IGNORED = -100
Logits = Callable[[Any, Tensor], Tensor]
EXACT = 1e-12  # fp64: losses, gradients and steps are of the order of 0.01 to 1, rounding of 1e-16
ROUNDED = 2e-6  # where something is kept in fp32: numbers up to 4, sixteen roundings to nearest, each of at most 2^-23

TOGETHER = ((0, 1), (2, 3))  # rows are context groups: of neighbours
APART = ((0, 2), (1, 3))  # of ranks that are not neighbours
SHORT = ((0, 1),)


@dataclass(frozen=True)
class Example:
    """mesh: world ranks, data x context. A step has `accumulation` micro-batches, each of `sequences` for a data rank.

    layout: the name of a kind, or "without rank 0", which then holds no tokens. silent: whether a rank has no labels.
    """

    mesh: tuple[tuple[int, ...], ...]
    layout: str = "zigzag"
    tokens: int = 23
    sequences: int = 2
    accumulation: int = 1
    steps: int = 2
    clip: float | None = None
    silent: bool = True

    def whole(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of a step over all ranks: tokens and labels, each (data * sequences, tokens).

        Many labels are ignored, at random, and if `silent` all that rank 0 of the first context group holds.
        """
        draw = torch.Generator().manual_seed(100 + step)
        rows = len(self.mesh) * self.sequences
        for _ in range(self.accumulation):
            tokens = torch.randint(VOCABULARY, (rows, self.tokens), generator=draw)
            labels = next_tokens(tokens)
            labels[torch.rand(labels.shape, generator=draw) < 0.4] = IGNORED
            if self.silent:
                labels[: self.sequences, self.arranged().positions(0)] = IGNORED
            yield tokens, labels

    def arranged(self) -> Layout:
        n, p = self.tokens, len(self.mesh[0])
        if self.layout == "without rank 0":
            return Layout.from_cuts(range(n), [0, *(rank * n // (p - 1) for rank in range(p))])
        made: Layout = getattr(Layout, self.layout)(n, p)
        return made

    def device_mesh(self) -> DeviceMesh:
        return DeviceMesh("cpu", torch.tensor(self.mesh), mesh_dim_names=("data", "context"))

    def handle(self, mesh: DeviceMesh) -> ContextParallel:
        return ContextParallel(self.arranged(), mesh["context"])

    def batches(self, step: int, mesh: DeviceMesh, context: ContextParallel) -> list[Batch]:
        """This rank's micro-batches of a step."""
        first = mesh["data"].get_local_rank() * self.sequences
        rows = slice(first, first + self.sequences)
        return [shard_batch(context, tokens[rows], labels[rows]) for tokens, labels in self.whole(step)]


@dataclass
class Result:
    """losses: of each step; norms: of its gradient before clipping; gradients: of the first step; parameters: after the
    last. What a framework does not show is left empty.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


ADAM: dict[str, Any] = {
    "lr": 0.01,
    "eps": 1e-3,
    "weight_decay": 0.1,
}  # with this eps a step is no steeper than 10 gradients


def dense(example: Example, model: nn.Module | None = None, logits_of: Logits = dense_logits) -> Result:
    """The example in one process: the whole batch at once, torch's own loss and clipping.

    logits_of: a function of a model and of the whole tokens.
    """
    model = SmallLlama() if model is None else model
    optimizer, result = optimizer_for(model), Result([], [], {}, {})
    for step in range(example.steps):
        tokens, labels = (torch.cat(parts) for parts in zip(*example.whole(step), strict=True))
        loss = functional.cross_entropy(logits_of(model, tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        result.losses.append(loss.item())
        greatest = float("inf") if example.clip is None else example.clip
        result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), greatest)))
        if step == 0:
            result.gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = {name: x.detach().clone() for name, x in model.named_parameters()}
    return result


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def differences(found: Result, exact: Result) -> dict[str, float]:
    """The greatest difference of each kind, of what was found at all."""
    pairs = {
        "losses": list(zip(found.losses, exact.losses, strict=True)),
        "norms": list(zip(found.norms, exact.norms, strict=True)) if found.norms else [],
    }
    worst = {kind: max((abs(a - b) for a, b in values), default=0.0) for kind, values in pairs.items()}
    for kind in ("gradients", "parameters"):
        mine, theirs = getattr(found, kind), getattr(exact, kind)
        assert not mine or mine.keys() == theirs.keys()
        worst[kind] = max((float((x - theirs[name]).abs().max()) for name, x in mine.items()), default=0.0)
    return worst


def labels_of(batch: Batch) -> Tensor:
    assert batch.labels is not None
    return batch.labels
