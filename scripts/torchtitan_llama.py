"""A Llama of torchtitan 0.3.0, with this ring as its attention, sharded by FSDP2 over data x context.

    pip install --no-deps -r requirements-torchtitan.txt
    torchrun --nproc-per-node=4 scripts/torchtitan_llama.py 2               # ranks that share sequences
    torchrun --nproc-per-node=4 scripts/torchtitan_llama.py 2 packed        # rows are packed from documents
    python -m verification model scripts.torchtitan_llama:Llama

The first two print the loss and the norm of the gradient of each step: the same with any number of ranks, to rounding.
The third compares drawn steps, packed too, with torchtitan's own attention in one process.

Rows that are packed from different documents are one long row: positions restart in each document, which sees itself
alone, and its last token has no label.

torchtitan builds a model from its configuration, so the attention is replaced there. Each block hands its
`attention_masks` to the attention as they are: here the `ContextParallel` handle of the batch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.module import Module

from reference.pattern import Pattern
from ring import Layout
from ring.integrations.wrappers import fsdp
from ring.nn import ContextParallel, clip_grad_norm, count_labels, cross_entropy, next_tokens, shard_batch
from verification.models import ModelCase, Part, Run, Setup

TOKENS, SEQUENCES, STEPS = 64, 4, 3


class RingInnerAttention(Module):
    """torchtitan's inner attention: heads (B, tokens, heads, dim), rotated by the batch's positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Has no settings: the pattern is causal."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: ContextParallel, scale: float | None, **_: Any
    ) -> Tensor:
        """Attend within the whole sequence; `enable_gqa` needs no word."""
        return attention_masks.attention(q, k, v, Pattern.dense(causal=True), scale=scale)


def build(attention: Module.Config, layers: int = 6, vocabulary: int = 2048) -> Any:
    """Build the model, in fp64, with the same parameters on every rank."""
    config = model_registry("debugmodel").model
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = vocabulary
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = attention
    torch.manual_seed(0)
    model = config.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    return model.double()


class Llama(Setup):
    """Two layers, with `ring.nn`'s step."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        """Build the model, in one process with torchtitan's attention."""
        config = ScaledDotProductAttention.Config() if context is None else RingInnerAttention.Config()
        return build(config, layers=2, vocabulary=19)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase without empty shards, which torchtitan's projections cannot reshape."""
        return case.without_empty_shards()

    def layers(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        """Return the class of the layers, which are in a dict."""
        return (Llama3TransformerBlock,)

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        """Call the model."""
        positions = part.positions.expand_as(part.tokens)
        return run.see(model(part.tokens, positions=positions, attention_masks=part.context))


def documents_of(draw: torch.Generator) -> list[tuple[int, ...]]:
    """Draw lengths of the documents that each sequence is packed from."""
    cuts = [int(torch.randint(1, TOKENS, (), generator=draw)) for _ in range(SEQUENCES)]
    return [(cut, TOKENS - cut) for cut in cuts]


def main(context_size: int, packed: bool) -> None:
    dist.init_process_group("gloo")
    data_size = dist.get_world_size() // context_size
    mesh = init_device_mesh("cpu", (data_size, context_size), mesh_dim_names=("data", "context"))
    mine = range(SEQUENCES)[mesh.get_local_rank("data") :: data_size]
    length = TOKENS * len(mine) if packed else TOKENS
    context = ContextParallel(Layout.zigzag(length, context_size), mesh["context"])
    model = fsdp.shard(build(RingInnerAttention.Config()), mesh, Llama3TransformerBlock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(2048, (SEQUENCES, TOKENS), generator=draw)[list(mine)].reshape(-1, length)
        lengths = documents_of(draw)
        documents = tuple(chain.from_iterable(lengths[row] for row in mine)) if packed else None
        batch = shard_batch(context, tokens, next_tokens(tokens, documents=documents), documents=documents)
        positions = batch.positions.expand(len(tokens), -1)
        logits = model(batch.tokens, positions=positions, attention_masks=batch.context)
        loss = cross_entropy(logits, batch.labels, mesh, labelled=count_labels(batch.labels, mesh))
        loss.backward()
        norm = clip_grad_norm(model.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        if not dist.get_rank():
            sys.stdout.write(f"loss {loss:.12f}, norm {norm:.12f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), "packed" in sys.argv[2:])
