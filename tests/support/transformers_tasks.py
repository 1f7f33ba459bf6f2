"""What ranks do with models of Hugging Face's transformers, of random weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from reference import Pattern, documents_from_positions
from ring import Layout
from ring.nn import ContextParallel, clip_grad_norm, cross_entropy, gather, next_tokens, shard_batch
from ring.nn.frameworks import ddp, fsdp, recompute, transformers
from tests.support.framework_example import TOGETHER, Example, Result, labels_of, optimizer_for
from tests.support.framework_llama import VOCABULARY
from tests.support.sharded_training import trained
from verification.run.processes.rendezvous import subgroup

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LONGNET = Pattern.longnet((6, 16), (1, 2), 4, causal=True)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip


def llama(**changes: Any) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).double()


def windowed() -> MistralForCausalLM:
    """Queries of all its layers see 5 tokens, themselves included."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)).double()


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """In one process, by the model's own attention."""
    logits: Tensor = model(tokens).logits
    return logits


def train(
    example: Example,
    checkpointing: dict[str, Any] | None = None,
    wrapper: str = "ddp",
    make: Callable[[], PreTrainedModel] = llama,
) -> Result:
    mesh, inner = example.device_mesh(), transformers.prepare(make())
    if checkpointing is not None:
        kept = {"context_fn": recompute.attention_kept} if checkpointing.pop("keep_attention", False) else {}
        inner.gradient_checkpointing_enable(checkpointing | kept)
    inner.train()
    model: Any = ddp.wrap(inner, mesh) if wrapper == "ddp" else fsdp.shard(inner, mesh, LlamaDecoderLayer)
    return trained(
        example, mesh, inner, optimizer_for(model),
        logits=lambda batch: model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits,
        micro_batch=lambda last: nullcontext(),
        clip=lambda: clip_grad_norm(model.parameters(), example.clip or 1e300, mesh),
    )  # fmt: skip


def in_16_bits(example: Example) -> Result:
    """One step in bf16 autocast: its loss and the norm of its gradient."""
    mesh = example.device_mesh()
    context = example.handle(mesh)
    model = ddp.wrap(transformers.prepare(llama().float()), mesh)
    (batch,) = example.batches(0, mesh, context)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
        loss = cross_entropy(logits, labels_of(batch), mesh)
    loss.backward()
    return Result([loss.item()], [float(clip_grad_norm(model.parameters(), 1e300, mesh))], {}, {})


def logits_on_ranks(example: Example, ranks: tuple[int, ...], autocast: bool, pattern: Pattern | None) -> Tensor | None:
    """The whole logits of a model in fp32, whose sequence these ranks of the world share."""
    group = subgroup(ranks)
    if group is None:
        return None
    context = ContextParallel(Example((ranks,), example.layout).arranged(), group)
    model = transformers.prepare(llama().float()).eval()
    tokens, _ = next(example.whole(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        positions = context.positions[None]
        out = model(context.shard(tokens), position_ids=positions, context=context, pattern=pattern).logits
    return gather(context, out)


def packed(lengths: tuple[int, ...], order: str) -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits, labels and positions of a batch that is packed from documents, as a collator flattens them."""
    tokens = packed_tokens(lengths)
    flattened = torch.cat([torch.arange(length) for length in lengths])[None]  # its position_ids, (1, N)
    documents = documents_from_positions(flattened)
    layout = Layout.zigzag(sum(lengths), 4, documents) if order == "zigzag" else Layout.contiguous(sum(lengths), 4)
    batch = shard_batch(ContextParallel(layout), tokens, next_tokens(tokens), documents=documents)
    assert batch.labels is not None
    with torch.no_grad():
        model = transformers.prepare(llama()).eval()
        out = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
    logits, labels, positions = (gather(batch.context, x) for x in (out, batch.labels, batch.positions[None]))
    return logits, labels, positions


def packed_tokens(lengths: tuple[int, ...]) -> Tensor:
    return torch.randint(VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))


def refused(name: str, on: tuple[int, ...] | None) -> tuple[str, float]:
    """What a call is refused with that these ranks (None: all) make wrong, and the mean of the logits of a right call
    that follows.
    """
    example = Example(TOGETHER)
    mesh = example.device_mesh()
    context = example.handle(mesh)
    (batch,) = example.batches(0, mesh, context)
    rank = torch.distributed.get_rank()
    wrong = on is None or rank in on
    right = {"position_ids": batch.positions[None], "context": context}
    model, given = wrong_call(name, batch.tokens, batch.positions) if wrong else (llama(), {})
    said = "nothing"
    try:
        transformers.prepare(model).train()
        model.config.use_cache = given.pop("use_cache", False)
        model(batch.tokens, **(right | given))
    except (ValueError, NotImplementedError) as error:
        said = f"{type(error).__name__}: {error}"
    after = transformers.prepare(llama())(batch.tokens, **right).logits
    return said, float(after.mean())


def wrong_call(name: str, tokens: Tensor, positions: Tensor) -> tuple[Any, dict[str, Any]]:
    """A model, and what is wrong in its call."""
    calls: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
        "a padding mask": lambda: (llama(), {"attention_mask": torch.ones_like(tokens)}),
        "a whole mask": lambda: (llama(), {"attention_mask": torch.ones(1, 1, tokens.shape[1], tokens.shape[1])}),
        "dropout": lambda: (llama(attention_dropout=0.1), {}),
        "no positions": lambda: (llama(), {"position_ids": None}),
        "positions of the shard": lambda: (llama(), {"position_ids": torch.arange(tokens.shape[1])[None] + 1}),
        "packed positions": lambda: (llama(), {"position_ids": (positions % 5)[None]}),
        "whole positions": lambda: (llama(), {"position_ids": torch.arange(23)[None]}),
        "dynamic rotary scaling": lambda: (llama(rope_parameters=DYNAMIC), {}),
        "longrope": lambda: (llama(rope_parameters=LONG), {}),
        "a cache": lambda: (llama(), {"use_cache": True}),
        "a cache that is given": lambda: (llama(), {"past_key_values": DynamicCache()}),
        "attention weights": lambda: (llama(), {"output_attentions": True}),
        "labels": lambda: (llama(), {"labels": tokens}),
        "the last logits": lambda: (llama(), {"logits_to_keep": 1}),
        "packed lengths": lambda: (llama(), {"cu_seq_lens_q": torch.tensor([0, 5, 12])}),
        "a softcap": lambda: (llama(), {"softcap": 30.0}),
        "sinks": lambda: (llama(), {"s_aux": torch.zeros(4)}),
        "a pattern beside a sliding window": lambda: (windowed(), {"pattern": LONGNET}),
        "another sliding window": lambda: (llama(), {"sliding_window": 0}),
        "a pattern that is not causal": lambda: (llama(), {"pattern": Pattern.dense()}),
        "no pattern": lambda: (llama(), {"pattern": "dense"}),
    }
    return calls[name]()


def without_a_handle() -> str:
    try:
        transformers.prepare(llama())(torch.zeros(1, 4, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return "nothing"


def positions_changed_in_place() -> str:
    """Positions that were right once, and are changed afterwards."""
    example = Example(TOGETHER)
    mesh = example.device_mesh()
    context = example.handle(mesh)
    (batch,) = example.batches(0, mesh, context)
    model, positions = transformers.prepare(llama()), batch.positions[None].clone()
    model(batch.tokens, position_ids=positions, context=context)
    positions += 1
    try:
        model(batch.tokens, position_ids=positions, context=context)
    except ValueError as error:
        return str(error)
    return "nothing"
