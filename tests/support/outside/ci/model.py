"""A model over the ring in training steps of `ring.nn`; in one process it has torch's attention."""

from dataclasses import replace

from their_ring import ring_attention
from torch import Tensor, nn

from ring.nn import ContextParallel
from verification.models import Setup
from verification.models.model_case import ModelCase


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, context: ContextParallel | None) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # (B, heads, tokens, head dim)
        if context is None:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = ring_attention(q, k, v, context.transport.group)
        return self.head(x + out.transpose(1, 2).flatten(2))


class OnRing(Setup):
    def build(self, context: ContextParallel | None) -> nn.Module:
        return Model()

    def claims(self, case: ModelCase) -> ModelCase:
        tokens = max(2, case.tokens // case.context) * case.context  # on each rank as many
        return replace(case, tokens=tokens, order="contiguous", cuts=None, packed=None, padding=False)
