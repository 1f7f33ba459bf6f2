"""A small model of ring blocks for `SameWeights`, its chunks, and one that fails in a place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring import Layout
from ring.nn import ContextParallel, LongNetBlock, SameWeights, next_tokens, shard_batch

TOKENS, CHUNK, VOCABULARY = 192, 16, 23


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Set torch to one thread, as `SameWeights` wants it on CPUs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model(nn.Module):
    """Two blocks of LongNet, and a head that shares the embedding's weights."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(LongNetBlock(32, 4, [32, 96], [1, 2], kv_heads=2) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight, self.recompute = self.embedding.weight, recompute

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute == "none":
                x = block(x, context)
            else:
                x = checkpoint(block, x, context, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view({4: torch.int32, 8: torch.int64}[x.itemsize])


class OwnError(Exception): ...


def _fail(*_: object) -> Tensor:
    raise OwnError("no such token")


class Fails(Model):
    """A model that counts its calls in a buffer, and fails in a place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.draws = place, bool(place)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        if self.draws and self.place:  # random numbers are refused after the comparison
            self.count = self.count + torch.rand(1).ceil()[0]
        x = self._at("before attention", self.embedding(tokens))
        x = self._at("after attention", self.blocks[0](x, context))
        return self.head(self.norm(x[..., 1:] if self.place == "in a module" else x))

    def _at(self, place: str, x: Tensor) -> Tensor:
        x = _fail() if self.place == place else x
        if self.place == f"{place}, backward" and x.requires_grad:
            x.register_hook(_fail)
        return x


OWN = "OwnError: no such token, in the model (Fails)"
MODULE = "but got input of size[1, 16, 31], in module 'norm' (LayerNorm)"
FORWARD = {"before attention": OWN, "after attention": OWN, "in a module": MODULE}
BACKWARD = "before attention, backward", "after attention, backward"


def failing(place: str, compare: bool = True, mesh: Any = None, over: Any = None) -> tuple[Fails, SameWeights, Any]:
    torch.manual_seed(1)
    model, group = Fails(place), mesh and mesh["context"]
    context = ContextParallel(Layout.whole_chunks(TOKENS, group.size() if mesh else 1, CHUNK), group, same_bits=CHUNK)
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    return model, SameWeights(model, over or mesh, compare=compare), shard_batch(context, tokens, next_tokens(tokens))
