"""Sound models of users, for tests/verification/models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from reference.pattern import Pattern
from ring import Layout, ring_attention
from ring.nn import (
    ContextParallel,
    LongNetBlock,
    RingAttention,
    SelfAttention,
    batch_mean,
    cross_entropy,
    gather,
    rotary,
    sequence_logprobs,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from verification.models import Part, Run, Setup, WholeBatch

VOCABULARY, DIM, HEADS, CAUSAL = 13, 8, 2, Pattern.dense(causal=True)


class Attention(nn.Module):
    """Causal attention: torch's own in one process, the ring's on ranks."""

    def __init__(self, ranks: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.inner = RingAttention(CAUSAL) if ranks else None

    def forward(self, x: Tensor, positions: Tensor, context: ContextParallel | None) -> Tensor:
        q, k, v = (y.unflatten(2, (HEADS, -1)) for y in self.qkv(x).chunk(3, -1))  # (B, N, H, D)
        q, k, v = (y.transpose(1, 2) for y in (rotary(q, positions), rotary(k, positions), v))
        if self.inner is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = self.inner(q, k, v, context=context)
        return self.out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, ranks: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(DIM), self.new_attention(ranks)
        self.mixer = self.new_mixer()
        self.feed_norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def new_attention(self, ranks: bool) -> Attention:
        return Attention(ranks)

    def new_mixer(self) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, context: ContextParallel | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, context)
        return self.mixer(x + self.down(functional.gelu(self.up(self.feed_norm(x)))))


class PlainModel(nn.Module):
    """tokens (B, N) -> logits (B, N, VOCABULARY)."""

    def __init__(self, ranks: bool, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([layer(ranks), layer(ranks)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, context)
        return self.head(self.norm(x))


def build(context: ContextParallel | None) -> nn.Module:
    return PlainModel(context is not None)


class WithBuffers(PlainModel):
    """Counts the tokens of all ranks, and keeps a table as long as its longest shard."""

    table: Tensor
    count: Tensor

    def __init__(self, ranks: bool, reduced: bool = True, counts: bool = True) -> None:
        super().__init__(ranks)
        self.reduced, self.counts = reduced, counts
        self.register_buffer("table", torch.zeros(1, DIM), persistent=False)
        self.register_buffer("count", torch.zeros(VOCABULARY, dtype=torch.int64))
        self.register_buffer("constant", torch.full((2,), float(ranks)))

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel | None = None) -> Tensor:
        self.table = torch.arange(max(tokens.shape[1], len(self.table))).repeat(DIM, 1).mT.contiguous()
        count = tokens.flatten().bincount(minlength=VOCABULARY)
        if context is not None and self.reduced:
            dist.all_reduce(count)
        self.count += count * self.counts
        with torch.enable_grad():
            return super().forward(tokens, positions, context)


def build_with_buffers(context: ContextParallel | None) -> nn.Module:
    return WithBuffers(context is not None)


class InFp32(PlainModel):
    """Refuses fp64, as fused kernels do."""

    def forward(self, tokens: Tensor, positions: Tensor, context: ContextParallel | None = None) -> Tensor:
        if self.norm.weight.dtype == torch.float64:
            raise RuntimeError("no fp64")
        return super().forward(tokens, positions, context)


def build_in_fp32(context: ContextParallel | None) -> nn.Module:
    return InFp32(context is not None)


def llama(context: ContextParallel | None, compare: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ring.integrations.transformers import prepare

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    return model if context is None else prepare(model, context.transport if compare else None, compare=compare)


class WithinClosure(Setup):
    """Computes gradients within the optimizer's step, as Lightning does."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return build(context)

    def step(self, model: nn.Module, optimizer: Any, batches: Sequence[WholeBatch], run: Run) -> Any:
        results = []

        def closure() -> Tensor:
            results.append(super(WithinClosure, self).step(model, cast(Any, Stepless()), batches, run))
            return torch.zeros(())

        optimizer.step(closure)
        optimizer.zero_grad()
        return results[0]


class Stepless:
    """An optimizer that leaves all as it is."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class PaddingOverwritten(Setup):
    """Shows logits of zeros at padding, where a mask changes them."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return build(context)

    def step(self, model: nn.Module, optimizer: Any, batches: Sequence[WholeBatch], run: Run) -> Any:
        result = super().step(model, optimizer, batches, run)
        for number, batch in enumerate(batches):
            logits, held = run.logits[number]
            assert held is not None and batch.padding.any()
            run.logits[number] = logits.masked_fill(batch.padding[:, held, None], 0.0), held
        return result


class OfRing(Setup):
    """Modules, functions and losses of `ring.nn` in one process too, without documents."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        return RingModel()

    def loss(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        context = part.context or ContextParallel(Layout.contiguous(part.tokens.shape[1], 1))
        logits = self.logits(model, part, run)
        loss = cross_entropy(logits, part.labels, run.mesh, labelled=run.labelled)
        loss = loss + token_mean(logits.square().sum(2), part.labels, run.mesh, labelled=run.labelled)
        values = sequence_logprobs(logits, part.labels, context) + sequence_mean(context, logits)[:, 0]
        values = values + gather(context, logits)[:, 1, 0] * sequence_sum(context, logits)[:, 1]
        counted = run.case.data * run.case.accumulation * run.case.batch
        return loss + batch_mean(values, context, run.mesh, counted=counted)


ring_nn = OfRing()


class RingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.attention = SelfAttention(DIM, HEADS, CAUSAL, qk_norm=True, sinks=True, softcap=3.0)
        self.block, self.inner = LongNetBlock(DIM, HEADS, [4, 8], [1, 2]), RingAttention(CAUSAL)

    def forward(self, tokens: Tensor, context: ContextParallel | None = None) -> Tensor:
        context = context or ContextParallel(Layout.contiguous(tokens.shape[1], 1))
        x = self.embedding(tokens)
        x = self.block(x + self.attention(x, context), context)
        q = rotary(x.unflatten(2, (HEADS, -1)), context.positions)
        x = self.inner(*[q.transpose(1, 2)] * 3, scale=0.7, context=context).transpose(1, 2)
        return self.head((x + ring_attention(q, q, q, CAUSAL, context.layout, group=context.transport)).flatten(2))


def llama_unchecked(context: ContextParallel | None) -> nn.Module:
    return llama(context, compare=False)


class LongNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.blocks = nn.ModuleList(LongNetBlock(DIM, HEADS, [8, 32], [1, 2]) for _ in range(2))

    def forward(self, tokens: Tensor, context: ContextParallel | None = None) -> Tensor:
        x, context = self.embedding(tokens), context or ContextParallel(Layout.contiguous(tokens.shape[1], 1))
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


def longnet(context: ContextParallel | None) -> nn.Module:
    return LongNet()
