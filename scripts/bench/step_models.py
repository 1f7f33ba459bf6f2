"""The models whose training steps are timed: shaped like Llama, and like LongNet. Their attention is given to forward.

    model = made("llama", shape, device, torch.bfloat16)
    losses = model(tokens, labels, context, attend)             # (B, N), of this rank's tokens

The model holds nothing of the way in which it attends, so that all ways share one model's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.workload import Attend
from ring.nn import ContextParallel
from ring.nn.rotary import THETA, angles_of, turned

CHUNK = 4096  # tokens whose logits exist at a time
EPSILON = 1e-5  # of all norms
KINDS = ("llama", "longnet")


@dataclass(frozen=True)
class ModelShape:
    """width: of the feed-forward. kv_heads: of the Llama-shaped model; the other has as many as query heads."""

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
    """Projections and rotary positions; the attention itself is given. inner_norm: before the last projection."""

    def __init__(self, dim: int, heads: int, kv_heads: int, bias: bool = False, inner_norm: bool = False) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias), nn.Linear(dim, dim, bias)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias)
        self.inner_norm = nn.LayerNorm(dim, EPSILON) if inner_norm else None

    def forward(self, x: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, N, H or Hk, D)
        angles = angles_of(context, q, THETA)
        out = attend(turned(q, *angles), turned(k, *angles), v).flatten(2)
        return self.o_proj(out if self.inner_norm is None else self.inner_norm(out))


class LlamaStepLayer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        dim, width = shape.dim, shape.width
        self.attention_norm, self.norm = nn.RMSNorm(dim, EPSILON), nn.RMSNorm(dim, EPSILON)
        self.attention = StepAttention(dim, shape.heads, shape.kv_heads)
        self.gate, self.up = nn.Linear(dim, width, bias=False), nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context, attend)
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class LongNetStepLayer(nn.Module):
    """As `ring.nn.LongNetBlock`: attention and a feed-forward, each behind a norm, and with one before its last
    projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        dim, width = shape.dim, shape.width
        self.attention_norm, self.norm = nn.LayerNorm(dim, EPSILON), nn.LayerNorm(dim, EPSILON)
        self.attention = StepAttention(dim, shape.heads, shape.heads, bias=True, inner_norm=True)
        self.fc1, self.fc2 = nn.Linear(dim, width), nn.Linear(width, dim)
        self.inner_norm = nn.LayerNorm(width, EPSILON)

    def forward(self, x: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context, attend)
        return x + self.fc2(self.inner_norm(functional.gelu(self.fc1(self.norm(x)))))


class StepModel(nn.Module):
    """A language model of `shape.layers` layers."""

    def __init__(self, kind: str, shape: ModelShape) -> None:
        super().__init__()
        layer, norm = {"llama": (LlamaStepLayer, nn.RMSNorm), "longnet": (LongNetStepLayer, nn.LayerNorm)}[kind]
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(layer(shape) for _ in range(shape.layers))
        self.norm = norm(shape.dim, EPSILON)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, context: ContextParallel, attend: Attend) -> Tensor:
        """tokens, labels (B, N) -> the loss of each token, (B, N), 0 where it has no label; fp32, or fp64 for fp64."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context, attend)
        x, count = self.norm(x), x.shape[1]
        return torch.cat(
            [
                checkpoint(self.losses, x[:, i : i + CHUNK], labels[:, i : i + CHUNK], use_reentrant=False)
                for i in range(0, count, CHUNK)
            ],
            1,
        )

    def losses(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(h).flatten(0, 1)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)


def made(kind: str, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> StepModel:
    """The same parameters on every rank."""
    torch.manual_seed(0)
    with device:
        model = StepModel(kind, shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=shape.dim**-0.5)
    return model.to(dtype)
