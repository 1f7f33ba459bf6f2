"""A small Llama on ring.nn, and its logits in one process, with attention and rotary positions written anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference import Pattern
from ring.nn import ContextParallel, SelfAttention

VOCABULARY, DIM, HEADS, KV_HEADS, HIDDEN, LAYERS = 19, 24, 4, 2, 40, 2
THETA = 10000.0


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
    """The whole sequence in one process, by torch's own attention."""
    x = model.embedding(tokens)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        attention, y = layer.attention, layer.attention_norm(x)
        q, k, v = (
            project(y).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, heads in (
                (attention.q_proj, HEADS),
                (attention.k_proj, KV_HEADS),
                (attention.v_proj, KV_HEADS),
            )
        )
        out = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.hidden(x)
    return model.head(model.norm(x))


def turned(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... of x (B, H, N, D): the pair (d, d + D / 2) is a complex number that is turned."""
    half = x.shape[-1] // 2
    rate = THETA ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rate
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)
