"""Models of TrainingCases, built from modules of `ring.nn`. Each rank has only its own tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from reference.pattern import Pattern
from ring.nn import ContextParallel, LongNetBlock, RingAttention, SelfAttention, rotary
from verification.models.batches import VOCABULARY
from verification.training.training_case import TrainingCase
from verification.training.training_model import NORM_EPS, Model

# (Case, name of the layer) -> inner attention of a "sdpa" model, called like `RingAttention`.
Inner = Callable[[TrainingCase, str], nn.Module]


def ring_inner(case: TrainingCase, name: str) -> nn.Module:
    """Inner attention of this project."""
    return RingAttention(case.pattern_of_modules, name=name)


class LanguageModel(nn.Module):
    """Embedding, layers, norm, head. inner: the attention of a "sdpa" model."""

    def __init__(self, case: TrainingCase, inner: Inner = ring_inner) -> None:
        super().__init__()
        model = case.model
        self.embedding = nn.Embedding(VOCABULARY, model.dim)
        self.position_table = nn.Embedding(case.tokens, model.dim) if model.positions == "learned" else None
        self.layers = nn.ModuleList([_layer(case, i, inner) for i in range(model.layers)])
        self.norm = _norm(model)
        self.head = nn.Linear(model.dim, VOCABULARY, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel) -> Tensor:
        """tokens (B, N) and positions (N,) of this rank -> logits (B, N, vocabulary)."""
        x = self.embedding(tokens)  # (B, N, dim)
        if self.position_table is not None:
            x = x + self.position_table(positions.expand_as(tokens))
        for layer in self.layers:
            x = layer(x, context, positions)
        return self.head(self.norm(x))


def _layer(case: TrainingCase, number: int, inner: Inner) -> nn.Module:
    model, pattern, name = case.model, case.pattern_of_modules, f"layer {number}"
    theta = model.theta(number) if model.positions == "rotary" else None
    if model.kind == "llama":
        return LlamaLayer(model, pattern, name, theta)
    if model.kind == "sdpa":
        return PlainLayer(model, inner(case, name), theta)
    lengths = [branch.segment_length or 0 for branch in pattern.branches]
    ratios = [branch.dilation_rate for branch in pattern.branches]
    return LongNetBlock(
        model.dim, model.heads, lengths, ratios, ffn_dim=2 * model.dim, kv_heads=model.kv_heads, causal=pattern.causal,
        subln=model.subln, rotary_theta=theta, norm_eps=NORM_EPS, name=name,
    )  # fmt: skip


def _norm(model: Model) -> nn.Module:
    return nn.RMSNorm(model.dim, NORM_EPS) if model.norm == "rms" else nn.LayerNorm(model.dim, NORM_EPS)


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + gated feed-forward(norm(x))."""

    def __init__(self, model: Model, pattern: Pattern, name: str, theta: float | None) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = SelfAttention(
            model.dim, model.heads, pattern, kv_heads=model.kv_heads, head_dim=model.head_dim, bias=model.bias,
            rotary_theta=theta, qk_norm=model.qk_norm, name=name,
        )  # fmt: skip
        self.feed_norm = _norm(model)
        self.gate = nn.Linear(model.dim, 2 * model.dim, bias=False)
        self.up = nn.Linear(model.dim, 2 * model.dim, bias=False)
        self.down = nn.Linear(2 * model.dim, model.dim, bias=False)

    def forward(self, x: Tensor, context: ContextParallel, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context, positions)
        fed = self.feed_norm(x)
        return x + self.down(functional.silu(self.gate(fed)) * self.up(fed))


class PlainLayer(nn.Module):
    """A transformer layer of plain torch modules, except for its inner attention."""

    def __init__(self, model: Model, inner: nn.Module, theta: float | None) -> None:
        super().__init__()
        self.attention_norm = _norm(model)
        self.attention = PlainAttention(model, inner, theta)
        self.feed_norm = _norm(model)
        self.up = nn.Linear(model.dim, 2 * model.dim)
        self.down = nn.Linear(2 * model.dim, model.dim)

    def forward(self, x: Tensor, context: ContextParallel, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context, positions)
        return x + self.down(functional.gelu(self.up(self.feed_norm(x))))


class PlainAttention(nn.Module):
    """Projections around `RingAttention`, or a peer, in place of `scaled_dot_product_attention`."""

    def __init__(self, model: Model, inner: nn.Module, theta: float | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.theta = model.heads, model.kv_heads, theta
        self.scaled = {} if model.scale is None else {"scale": model.scale}
        self.q_proj = nn.Linear(model.dim, model.heads * model.head_dim, model.bias)
        self.k_proj = nn.Linear(model.dim, model.kv_heads * model.head_dim, model.bias)
        self.v_proj = nn.Linear(model.dim, model.kv_heads * model.head_dim, model.bias)
        self.o_proj = nn.Linear(model.heads * model.head_dim, model.dim, model.bias)
        self.inner = inner

    def forward(self, x: Tensor, context: ContextParallel, positions: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(2, (self.heads, -1))  # (B, N, H, D)
        k = self.k_proj(x).unflatten(2, (self.kv_heads, -1))
        v = self.v_proj(x).unflatten(2, (self.kv_heads, -1))
        if self.theta is not None:
            q, k = rotary(q, positions, self.theta), rotary(k, positions, self.theta)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H, N, D)
        out = self.inner(q, k, v, enable_gqa=self.heads != self.kv_heads, context=context, **self.scaled)
        return self.o_proj(out.transpose(1, 2).flatten(2))


LAYERS = (LlamaLayer, PlainLayer, LongNetBlock)
