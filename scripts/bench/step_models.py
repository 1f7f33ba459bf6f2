"""Models shaped like Llama and LongNet, whose training steps are timed. Attention is an argument of forward.

    model = build_model("llama", shape, device, torch.bfloat16)
    losses = model(tokens, labels, context, attend)             # (B, N), of this rank's tokens

The model has no state of its attention method, so that all methods share its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.workload import Attend
from ring.nn import ContextParallel
from ring.nn.rotary import THETA, cached_angles, rotate

CHUNK = 4096  # tokens whose logits exist at a time
EPSILON = 1e-5  # of all norms
NORMS: dict[str, Callable[[int, float], nn.Module]] = {"llama": nn.RMSNorm, "longnet": nn.LayerNorm}
KINDS = tuple(NORMS)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. width: of the feed-forward. kv_heads: of llama only; longnet has as many as query heads."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


SHAPES = {"cuda": ModelShape(8, 2048, 16, 8, 8192, 8192), "cpu": ModelShape(2, 64, 4, 2, 128, 256)}  # by device


class StepAttention(nn.Module):
    """Projections and rotary positions around a given attention. inner_norm: before the last projection."""

    def __init__(self, shape: ModelShape, kv_heads: int, bias: bool, inner_norm: nn.Module) -> None:
        super().__init__()
        self.head_dim, dim = shape.head_dim, shape.dim
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias), nn.Linear(dim, dim, bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * self.head_dim, bias) for _ in range(2))
        self.inner_norm = inner_norm

    def forward(self, x: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, N, H or Hk, D)
        angles = cached_angles(context, q, THETA)
        return self.o_proj(self.inner_norm(attend(rotate(q, *angles), rotate(k, *angles), v).flatten(2)))


class StepLayer(nn.Module):
    """Attention and a feed-forward, each behind a norm.

    "llama": RMS norms, shared key/value heads, a gated feed-forward. "longnet": `ring.nn.LongNetBlock` with a norm
    before the last projection of each, too.
    """

    def __init__(self, kind: str, shape: ModelShape) -> None:
        super().__init__()
        dim, width, self.gated = shape.dim, shape.width, kind == "llama"
        self.attention_norm, self.norm = NORMS[kind](dim, EPSILON), NORMS[kind](dim, EPSILON)
        if self.gated:
            self.attention = StepAttention(shape, shape.kv_heads, False, nn.Identity())
            self.gate, self.up = nn.Linear(dim, width, bias=False), nn.Linear(dim, width, bias=False)
            self.down = nn.Linear(width, dim, bias=False)
        else:
            self.attention = StepAttention(shape, shape.heads, True, nn.LayerNorm(dim, EPSILON))
            self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
            self.inner_norm = nn.LayerNorm(width, EPSILON)

    def forward(self, x: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context, attend)
        h = self.norm(x)
        if self.gated:
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + self.down(self.inner_norm(functional.gelu(self.up(h))))


class StepModel(nn.Module):
    """A language model of `shape.layers` layers."""

    def __init__(self, kind: str, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(StepLayer(kind, shape) for _ in range(shape.layers))
        self.norm = NORMS[kind](shape.dim, EPSILON)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        """Compute the losses (B, N) of tokens, labels (B, N), 0 without a label; in fp32, or fp64 for fp64."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context, attend)
        chunks = zip(self.norm(x).split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)
        return torch.cat([checkpoint(self.losses, *chunk, use_reentrant=False) for chunk in chunks], 1)

    def losses(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(h).flatten(0, 1)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)


def build_model(kind: str, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> StepModel:
    """Build a model with the same parameters on every rank."""
    torch.manual_seed(0)
    with device:
        model = StepModel(kind, shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=shape.dim**-0.5)
    return model.to(dtype)
