"""A small Llama, and training steps of it for the tests of frameworks: on ranks, and in one dense process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from reference import Pattern
from ring import Layout
from ring.nn import Batch, ContextParallel, SelfAttention, count_labels, cross_entropy, next_tokens, shard_batch

VOCABULARY, DIM, HEADS, KV_HEADS, HIDDEN, LAYERS = 19, 24, 4, 2, 40, 2
THETA = 10000.0
IGNORED = -100
# With this eps a step is no steeper than 10 gradients.
ADAM: dict[str, Any] = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}

EXACT = 1e-12  # fp64: losses, gradients and steps are of the order of 0.01 to 1, rounding of 1e-16
ROUNDED = 2e-6  # where something is kept in fp32: numbers up to 4, sixteen roundings to nearest, each of at most 2^-23

TOGETHER = ((0, 1), (2, 3))  # rows are context groups: of neighbours
APART = ((0, 2), (1, 3))  # of ranks that are not neighbours
SHORT = ((0, 1),)


# --- the model --------------------------------------------------------------------------------------------------------


class DecoderLayer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        pattern = Pattern.dense(causal=True)
        self.attention_norm, self.hidden_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = SelfAttention(
            DIM, HEADS, pattern, kv_heads=KV_HEADS, rotary_theta=THETA, name=f"layer {number}"
        )
        self.up, self.gate, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def hidden(self, x: Tensor) -> Tensor:
        y = self.hidden_norm(x)
        return self.down(functional.silu(self.gate(y)) * self.up(y))

    def forward(self, x: Tensor, context: ContextParallel) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.hidden(x)


class SmallLlama(nn.Module):
    """tokens (B, N) -> logits (B, N, V)"""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, DIM)
            self.layers = nn.ModuleList(DecoderLayer(number) for number in range(LAYERS))
            self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.double()

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context)
        return self.head(self.norm(x))


def dense_logits(model: SmallLlama, tokens: Tensor) -> Tensor:
    """Compute the logits of the whole sequence in one process, by torch's own attention."""
    x = model.embedding(tokens)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        attention, y = layer.attention, layer.attention_norm(x)
        projections = ((attention.q_proj, HEADS), (attention.k_proj, KV_HEADS), (attention.v_proj, KV_HEADS))
        q, k, v = (project(y).unflatten(-1, (heads, -1)).transpose(1, 2) for project, heads in projections)
        out = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.hidden(x)
    return model.head(model.norm(x))


def turned(x: Tensor) -> Tensor:
    """Apply rotary positions 0, 1, ... to x (B, H, N, D), turning the pairs (d, d + D / 2) as complex numbers."""
    half = x.shape[-1] // 2
    rate = THETA ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rate
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


# --- the data ---------------------------------------------------------------------------------------------------------


@cache
def mesh_of(ranks: tuple[Any, ...], names: tuple[str, ...] = ("data", "context")) -> DeviceMesh:
    """Make a mesh of these world ranks, once in each process: its groups stay for later tests. Every rank calls it."""
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


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

    @property
    def world(self) -> int:
        return sum(map(len, self.mesh))

    def whole(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the micro-batches of a step over all ranks: tokens and labels, each (data * sequences, tokens).

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
        layout: Layout = getattr(Layout, self.layout)(n, p)
        return layout

    def device_mesh(self) -> DeviceMesh:
        return mesh_of(self.mesh)

    def handle(self, mesh: DeviceMesh) -> ContextParallel:
        return ContextParallel(self.arranged(), mesh["context"])

    def batches(self, step: int, mesh: DeviceMesh, context: ContextParallel) -> list[Batch]:
        """Shard the micro-batches of a step: this rank's part of each."""
        first = mesh["data"].get_local_rank() * self.sequences
        rows = slice(first, first + self.sequences)
        return [shard_batch(context, tokens[rows], labels[rows]) for tokens, labels in self.whole(step)]


def labels_of(batch: Batch) -> Tensor:
    assert batch.labels is not None
    return batch.labels


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """losses: of each step; norms: of its gradient before clipping; gradients: of the first step; parameters: after the
    last. What a framework does not show is left empty.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def dense(
    example: Example,
    model: nn.Module | None = None,
    logits_of: Callable[[Any, Tensor], Tensor] = dense_logits,
) -> Result:
    """Train the example in one process: the whole batch at once, torch's own loss and clipping.

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


def trained(
    example: Example,
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    logits: Callable[[Batch], Tensor],
    micro_batch: Callable[[bool], AbstractContextManager[object]],
    clip: Callable[[], Any] | None,
    zero_grad: Mapping[str, bool] | None = None,
    gradients: bool = True,
) -> Result:
    """Train the example on this rank, whatever wraps its model.

    inner: the model that is wrapped, whose parameters are looked at. logits: of the wrapped one. micro_batch: around
    forward and backward of one, given whether it is the step's last. clip: clips, and returns the norm before.
    gradients: whether this rank has all of them.
    """
    mesh, result = example.device_mesh(), Result([], [], {}, {})
    context = example.handle(mesh)
    for step in range(example.steps):
        batches = example.batches(step, mesh, context)
        labelled = count_labels([labels_of(batch) for batch in batches], mesh)
        losses = []
        for number, batch in enumerate(batches):
            with micro_batch(number == len(batches) - 1):
                loss = cross_entropy(logits(batch), labels_of(batch), mesh, labelled=labelled)
                loss.backward()
            losses.append(loss.item())
        result.losses.append(sum(losses))
        if clip is not None:
            result.norms.append(float(clip()))
        if gradients and step == 0:
            result.gradients = plain(gradients_of(inner))
        optimizer.step()
        optimizer.zero_grad(**zero_grad or {})
    result.parameters = plain(dict(inner.named_parameters()))
    return result


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def whole(x: Tensor) -> Tensor:
    """Copy a tensor out of its wrapper; every rank calls it, since a DTensor is gathered."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def plain(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copy whole tensors, by the names of a model that is not wrapped."""
    return {name.replace("_checkpoint_wrapped_module.", ""): whole(x) for name, x in tensors.items()}


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


def assert_near(results: list[Result], exact: Result, bound: float = EXACT) -> None:
    """Every rank's result is that of one process, and all ranks end with the same parameters, bit by bit."""
    for result in results:
        assert max(differences(result, exact).values()) < bound, differences(result, exact)
        for name, x in result.parameters.items():
            assert torch.equal(x, results[0].parameters[name]), f"{name} differs between ranks"
