"""A small language model, and training steps of it for the tests of frameworks: on ranks, and in one dense process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ring import Layout
from ring.nn import IGNORED, ContextParallel, LongNetBlock, count_labels, cross_entropy, next_tokens, shard_batch
from tests.support import nn_dense

VOCABULARY, DIM, HEADS = 19, 24, 4
SEGMENTS = ([8, 32], [1, 2])  # lengths and dilated ratios
# With this eps a step is no steeper than 10 gradients.
ADAM: dict[str, Any] = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}
EXACT = 1e-12  # fp64: losses, gradients and steps are of the order of 0.01 to 1, rounding of 1e-16
ROUNDED = 2e-6  # where something is kept in fp32: numbers up to 4, sixteen roundings to nearest, each of at most 2^-23
MESHES: dict[str, tuple[tuple[int, ...], ...]] = {  # data x context: rows are context groups
    "short": ((0, 1),), "line": ((0, 1, 2, 3),), "turned": ((2, 0, 3, 1),), "together": ((0, 1), (2, 3)),
    "apart": ((0, 2), (1, 3)),
}  # fmt: skip


class SmallModel(nn.Module):
    """tokens (B, N) -> logits (B, N, V)"""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, DIM)
            self.layers = nn.ModuleList(
                LongNetBlock(DIM, HEADS, *SEGMENTS, kv_heads=2, ffn_dim=40, name=f"layer {number}")
                for number in range(2)
            )
            self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.double()

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context)
        return self.head(self.norm(x))


def dense_logits(model: SmallModel, tokens: Tensor) -> Tensor:
    """Compute the logits of the whole sequence in one process, by the oracle's attention."""
    x = model.embedding(tokens)
    for layer in model.layers:
        assert isinstance(layer, LongNetBlock)
        x = nn_dense.longnet_block(x, dict(layer.named_parameters()), layer.attention.pattern, DIM // HEADS)
    return model.head(model.norm(x))


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


@cache
def mesh_of(ranks: tuple[Any, ...], names: tuple[str, ...] = ("data", "context")) -> DeviceMesh:
    """Make a mesh of these world ranks, once in each process: its groups stay for later tests. Every rank calls it."""
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


@dataclass(frozen=True)
class Example:
    """mesh: a name in MESHES. A step has `accumulation` micro-batches, each of `sequences` for a data rank.

    layout: the name of a kind, or "without rank 0", which then holds no tokens. silent: whether a rank has no labels.
    """

    mesh: str
    layout: str = "zigzag"
    tokens: int = 23
    sequences: int = 2
    accumulation: int = 1
    steps: int = 2
    clip: float | None = None
    silent: bool = True

    @property
    def device_mesh(self) -> DeviceMesh:
        return mesh_of(MESHES[self.mesh])

    @property
    def world(self) -> int:
        return sum(map(len, MESHES[self.mesh]))

    def whole(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the micro-batches of a step over all ranks: tokens and labels, each (data * sequences, tokens).

        Many labels are ignored, at random, and if `silent` all that rank 0 of the first context group holds.
        """
        draw = torch.Generator().manual_seed(100 + step)
        for _ in range(self.accumulation):
            tokens = torch.randint(VOCABULARY, (len(MESHES[self.mesh]) * self.sequences, self.tokens), generator=draw)
            labels = next_tokens(tokens)
            labels[torch.rand(labels.shape, generator=draw) < 0.4] = IGNORED
            if self.silent:
                labels[: self.sequences, self.arranged().positions(0)] = IGNORED
            yield tokens, labels

    def arranged(self) -> Layout:
        n, p = self.tokens, len(MESHES[self.mesh][0])
        if self.layout == "without rank 0":
            return Layout.from_cuts(range(n), [0, *(rank * n // (p - 1) for rank in range(p))])
        layout: Layout = getattr(Layout, self.layout)(n, p)
        return layout

    def handle(self) -> ContextParallel:
        return ContextParallel(self.arranged(), self.device_mesh["context"])

    def batches(self, step: int, context: ContextParallel, data: int | None = None) -> list[Any]:
        """Shard the micro-batches of a step: this rank's part of each. data: its data rank, by default of its mesh."""
        first = (self.device_mesh["data"].get_local_rank() if data is None else data) * self.sequences
        rows = slice(first, first + self.sequences)
        return [shard_batch(context, tokens[rows], labels[rows]) for tokens, labels in self.whole(step)]


@dataclass
class Result:
    """losses: of each step; norms: of its gradient before clipping; gradients: of the first step; parameters: after the
    last. What a framework does not show is left empty."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def dense(
    example: Example, model: nn.Module | None = None, logits_of: Callable[[Any, Tensor], Tensor] = dense_logits
) -> Result:
    """Train the example in one process: the whole batch at once, torch's own loss and clipping.

    logits_of: a function of a model and of the whole tokens.
    """
    model, result = model or SmallModel(), Result()
    optimizer = optimizer_for(model)
    for step in range(example.steps):
        tokens, labels = (torch.cat(parts) for parts in zip(*example.whole(step), strict=True))
        loss = functional.cross_entropy(logits_of(model, tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        result.losses.append(loss.item())
        result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), example.clip or torch.inf)))
        if step == 0:
            result.gradients = plain({name: x.grad for name, x in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = plain(dict(model.named_parameters()))
    return result


def trained(
    example: Example,
    inner: nn.Module,
    model: Callable[[Tensor, ContextParallel], Tensor],
    optimizer: Any = None,
    *,
    micro_batch: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
    backward: Callable[[Tensor], object] = Tensor.backward,
    clip: Callable[[], Any] | None = None,
    zero_grad: Mapping[str, bool] | None = None,
    gradients: bool = True,
    steps: range | None = None,
    place: tuple[DeviceMesh, ContextParallel, int] | None = None,
) -> Result:
    """Train the example on this rank, whatever wraps its model.

    inner: the model that is wrapped, whose parameters are looked at. micro_batch: around forward and backward of one,
    given whether it is the step's last. clip: clips, and returns the norm before. gradients: whether this rank has all.
    place: the mesh of losses, the handle and the data rank, by default those of the example's mesh.
    """
    mesh, context, data = place or (example.device_mesh, example.handle(), None)
    result = Result()
    optimizer = optimizer or optimizer_for(inner)
    for step in steps or range(example.steps):
        batches = example.batches(step, context, data)
        labelled, total = count_labels([batch.labels for batch in batches], mesh), 0.0
        for number, batch in enumerate(batches, 1):
            with micro_batch(number == len(batches)):
                loss = cross_entropy(model(batch.tokens, batch.context), batch.labels, mesh, labelled=labelled)
                backward(loss)
            total += loss.item()
        result.losses.append(total)
        if clip is not None:
            result.norms.append(float(clip()))
        if gradients and step == 0:
            result.gradients = plain({name: x.grad for name, x in inner.named_parameters()})
        optimizer.step()
        optimizer.zero_grad(**zero_grad or {})
    result.parameters = plain(dict(inner.named_parameters()))
    return result


def whole(x: Tensor) -> Tensor:
    """Copy a tensor out of its wrapper; every rank calls it, since a DTensor is gathered."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def plain(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copy whole tensors, by the names of a model that is not wrapped."""
    return {name.replace("_checkpoint_wrapped_module.", ""): whole(x) for name, x in tensors.items()}


def assert_near(results: list[Result], exact: Result, *, kept_in_fp32: bool = False) -> None:
    """Every rank's result is that of one process, and all ranks end with the same parameters, bit by bit."""
    bound = ROUNDED if kept_in_fp32 else EXACT
    for result in results:
        for kind, found in vars(result).items():
            if found or kind in ("losses", "parameters"):
                torch.testing.assert_close(found, getattr(exact, kind), rtol=0.0, atol=bound, check_dtype=False)
        torch.testing.assert_close(result.parameters, results[0].parameters, rtol=0.0, atol=0.0)
