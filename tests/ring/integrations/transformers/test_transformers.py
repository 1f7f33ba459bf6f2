"""Models of random weights from Hugging Face's transformers: trained as in one process, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from reference import Branch, Pattern, documents_from_positions
from ring import Layout
from ring.integrations import transformers
from ring.integrations.transformers.masks import ChunkMask, WindowMask
from ring.integrations.wrappers import ddp, fsdp, recompute
from ring.nn import ContextParallel, clip_grad_norm, gather, shard_batch
from tests.support.framework_example import EXACT, VOCABULARY, Example, Result, assert_near, dense, trained
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LONGNET = Pattern.longnet((6, 16), (1, 2), 4, causal=True)


def llama(**changes: Any) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).double()


def windowed() -> MistralForCausalLM:
    """Make a model in all of whose layers queries see 5 tokens, themselves included."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)).double()


def with_sinks() -> GptOssForCausalLM:
    """Make a model with sinks, which sees 5 tokens in its first layer."""
    config = GptOssConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"], num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return GptOssForCausalLM(config).double()


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute logits in one process, by the model's own attention."""
    logits: Tensor = model(tokens).logits
    return logits


def _train(example: Example, checkpointing: Any, wrapper: str, make: Callable[[], PreTrainedModel]) -> Result:
    mesh = example.device_mesh
    inner = transformers.prepare(make(), mesh["context"])
    if checkpointing is not None:
        inner.gradient_checkpointing_enable(checkpointing)
    inner.train()
    model: Any = (
        ddp.wrap(inner, mesh) if wrapper == "ddp" else fsdp.shard(inner, mesh, (LlamaDecoderLayer, GptOssDecoderLayer))
    )

    def logits(tokens: Tensor, context: ContextParallel) -> Tensor:
        out: Tensor = model(tokens, position_ids=context.positions[None], context=context).logits
        return out

    return trained(example, inner, logits, clip=lambda: clip_grad_norm(model.parameters(), example.clip or 1e300, mesh))


AGAIN, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
KEPT = {"use_reentrant": False, "context_fn": recompute.attention_kept}


@pytest.mark.parametrize(
    ("mesh", "checkpointing", "wrapper", "make"),
    [
        ("together", None, "ddp", llama),
        ("line", AGAIN, "ddp", llama),
        ("apart", KEPT, "fsdp", llama),
        ("line", None, "ddp", windowed),
        ("together", None, "ddp", with_sinks),
        ("apart", KEPT, "fsdp", with_sinks),
        pytest.param("apart", REENTRANT, "ddp", llama, marks=pytest.mark.slow),
        pytest.param("apart", KEPT, "ddp", llama, marks=pytest.mark.slow),
        pytest.param("apart", REENTRANT, "fsdp", llama, marks=pytest.mark.slow),
    ],
)
def test_transformers_train_as_one_process(
    ranks: Ranks, mesh: str, checkpointing: Any, wrapper: str, make: Any
) -> None:
    example = Example(mesh, clip=0.5)
    exact = dense(example, make(), logits_of)
    assert_near(ranks(4).run(_train, example, checkpointing, wrapper, make), exact)
    if make is windowed:
        unlimited = dense(example, llama(), logits_of)
        assert abs(unlimited.losses[0] - exact.losses[0]) > 1e-6, "a window that hides nothing"


LENGTHS = (5, 1, 9, 8)


def packed_tokens() -> Tensor:
    return torch.randint(VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))


def _run_packed() -> Tensor:
    """Whole logits of a batch that is packed from documents, as a collator flattens them."""
    flattened = torch.cat([torch.arange(length) for length in LENGTHS])[None]  # its position_ids, (1, N)
    documents = documents_from_positions(flattened)
    context = ContextParallel(Layout.zigzag(sum(LENGTHS), 4, documents))
    batch = shard_batch(context, packed_tokens(), documents=documents)
    model = transformers.prepare(llama()).eval()
    out = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
    return gather(batch.context, out)


def test_packed_documents_are_as_each_by_itself(ranks: Ranks) -> None:
    exact = torch.cat([logits_of(llama().eval(), document) for document in packed_tokens().split(LENGTHS, 1)], 1)
    for logits in ranks(4).run(_run_packed):
        torch.testing.assert_close(logits, exact.detach(), rtol=EXACT, atol=EXACT)


class CallingLayer(nn.Module):
    """The attributes of a model's attention module."""

    def __init__(self, rotary: dict[str, Any] | None = None, causal: bool = True, chunked: bool = False) -> None:
        super().__init__()
        kinds = ["full_attention"] * 3 + ["chunked_attention" if chunked else "full_attention"]
        self.is_causal, self.layer_idx = causal, 3
        self.config = SimpleNamespace(rope_parameters=rotary, layer_types=kinds)


def handle_and_inputs() -> tuple[ContextParallel, list[Tensor], dict[str, Any]]:
    """A handle of one rank; q (B, H, N, D), k (B, Hk, N, D), v (B, Hk, N, Dv); what every call is given."""
    context = ContextParallel(Layout.contiguous(7, 1))
    draw = torch.Generator().manual_seed(2)
    shapes = ((2, 4, 7, 2), (2, 2, 7, 2), (2, 2, 7, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, generator=draw).requires_grad_() for shape in shapes]
    return context, inputs, {"context": context, "position_ids": context.positions.repeat(2, 1)}


@pytest.mark.parametrize(
    ("layer", "arguments", "pattern"),
    [
        (CallingLayer(), {}, Pattern.dense(True)),
        (CallingLayer(causal=False), {"scaling": 0.25}, Pattern.dense()),
        (CallingLayer(causal=False), {"is_causal": True}, Pattern.dense(True)),
        (CallingLayer(), {"is_causal": False}, Pattern.dense()),
        (CallingLayer(), {"sliding_window": 3}, Pattern.dense(True, window=2)),
        (CallingLayer(), {"sliding_window": 1}, Pattern.dense(True, window=0)),
        (CallingLayer(), {"pattern": LONGNET}, LONGNET),
        (
            CallingLayer(),
            {"softcap": None, "s_aux": None, "cache_position": 1},
            Pattern.dense(True),
        ),  # they say nothing
        (CallingLayer(), {"softcap": 0.5}, Pattern.dense(True)),
        (CallingLayer(), {"s_aux": torch.tensor([0.5, -0.5, 0.0, -torch.inf])}, Pattern.dense(True)),
        (CallingLayer(), {"softcap": 0.5, "s_aux": torch.ones(4), "sliding_window": 3}, Pattern.dense(True, window=2)),
        (CallingLayer(), {"s_aux": torch.ones(4), "pattern": LONGNET}, LONGNET),
        (CallingLayer(), {"attention_mask": ChunkMask(3)}, Pattern((Branch(3),), True)),
        (CallingLayer(), {"attention_mask": WindowMask(3)}, Pattern.dense(True, window=2)),
        (CallingLayer(causal=False), {"attention_mask": WindowMask(3)}, Pattern.dense(window=3)),
        (CallingLayer(causal=False), {"attention_mask": WindowMask(3), "sliding_window": 4}, Pattern.dense(window=3)),
        (CallingLayer({"rope_type": "llama3"}), {}, Pattern.dense(True)),
    ],
)
def test_attention_of_a_layer_is_that_of_the_handle(
    layer: CallingLayer, arguments: dict[str, Any], pattern: Pattern
) -> None:
    context, (q, k, v), right = handle_and_inputs()
    out, weights = transformers.attention(layer, q, k, v, **{"attention_mask": None} | right | arguments)
    sinks = None if arguments.get("s_aux") is None else arguments["s_aux"].double()
    expected = context.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pattern, scale=arguments.get("scaling"),
        softcap=arguments.get("softcap"), sinks=sinks,
    )  # fmt: skip
    assert weights is None and torch.equal(out, expected)
    grads, exact = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    assert all(torch.equal(x, y) for x, y in zip(grads, exact, strict=True))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip
NOT_OF_A_LAYER: list[tuple[str, dict[str, Any]]] = [
    *(
        ("rope_type must not depend", {"layer": CallingLayer(rotary)})
        for rotary in (DYNAMIC, LONG, {"full": {"rope_type": "default"}, "b": DYNAMIC})
    ),
    ("attention_mask must be None, got Tensor from CallingLayer", {"attention_mask": torch.ones(1, 1, 7, 7)}),
    ("dropout of attention must be 0, got 0.1", {"dropout": 0.1}),
    *(("softcap must be None or a number from 1e-30", {"softcap": cap}) for cap in (0, -1.0, True, torch.ones(1))),
    *(
        (r"s_aux must be None or \(4,\) floating numbers, a sink for each query head", {"s_aux": sinks})
        for sinks in (torch.zeros(2), torch.zeros(1, 4), torch.zeros(4, dtype=torch.int64), [0.0] * 4)
    ),
    ("s_aux must be on the query's device cpu, got meta", {"s_aux": torch.zeros(4, device="meta")}),
    ("pattern must be None for a layer with attention in chunks of 3",
     {"attention_mask": ChunkMask(3), "pattern": Pattern.dense(True)}),
    *(
        ("attention in chunks must be causal, without a sliding window", {"attention_mask": ChunkMask(3)} | wrong)
        for wrong in ({"is_causal": False}, {"sliding_window": 2})
    ),
    *(
        ("attention_mask must be the model's own of chunks",
         {"layer": CallingLayer(chunked=True), "attention_mask": mask})
        for mask in (None, WindowMask(3))
    ),
    ("output_attentions must be left out: .* True from CallingLayer", {"output_attentions": True}),
    *(
        ("position_ids must be", {"position_ids": ids})
        for ids in (None, torch.arange(7), torch.arange(6)[None], torch.arange(7)[None, :, None], torch.ones(1, 7))
    ),
    *(("sliding_window must be at least 1 token", {"sliding_window": window}) for window in (0, True, 2.0)),
    ("sliding_window must come with the model's own mask", {"sliding_window": 2, "is_causal": False}),
    *(
        ("sliding_window must be at least 1 token, as the model's mask has it, got 3",
         {"sliding_window": 3, "attention_mask": WindowMask(window), "is_causal": causal})
        for window, causal in ((2, True), (4, True), (1, False), (3, False))
    ),
    ("pattern must be None for a layer with a sliding", {"sliding_window": 2, "pattern": Pattern.dense(True)}),
    ("pattern must be causal as the model is", {"pattern": Pattern.dense()}),
    ("pattern must be a Pattern or None", {"pattern": "dense"}),
    ("context must be given to the model's call", {"context": None}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "wrong"), NOT_OF_A_LAYER)
def test_refuses_arguments_that_a_layer_may_not_give(words: str, wrong: dict[str, Any]) -> None:
    _, (q, k, v), right = handle_and_inputs()
    arguments = {"layer": CallingLayer(), "attention_mask": None} | right | wrong
    with pytest.raises((ValueError, NotImplementedError), match=words):
        transformers.attention(arguments.pop("layer"), q, k, v, arguments.pop("attention_mask"), **arguments)


@pytest.mark.parametrize("check", [True, False])
def test_positions_that_change_in_place_are_seen(check: bool) -> None:
    """Unless the handle is not to look at values."""
    context, (q, k, v), _ = handle_and_inputs()
    context = ContextParallel(context.layout, check=check)
    positions = context.positions[None].clone()
    for _ in range(2):  # the second time they may be trusted
        transformers.attention(CallingLayer(), q, k, v, None, position_ids=positions, context=context)
    positions += 1
    with pytest.raises(ValueError, match="position_ids must be") if check else nullcontext():
        transformers.attention(CallingLayer(), q, k, v, None, position_ids=positions, context=context)


def test_masks_that_a_model_makes_by_itself_are_not_dropped() -> None:
    """Blocks of an image, which see each other, a function of one's own, and zeros; without these there is no mask."""
    transformers.register()
    config = llama().config
    config._attn_implementation = transformers.NAME
    x, positions = torch.zeros(1, 6, 32), torch.tensor([[0, 1, 2, 9, 10, 11]])
    blocks, function = {"block_sequence_ids": torch.zeros(1, 6, dtype=torch.int64)}, {"and_mask_function": max}
    masks = [create_causal_mask(config, x, None, None, positions, **extra) for extra in ({}, blocks, function)]
    assert masks == [None, "a mask function", "a mask function"]
    zero = torch.tensor([[1, 1, 1, 1, 0, 1]])
    masks = [
        create_causal_mask(config, x, mask, None, positions) for mask in (torch.ones(1, 6), zero, zero[None, None])
    ]
    assert masks[:2] == [None, "a mask"] and isinstance(masks[2], Tensor)  # which the attention refuses


@pytest.mark.parametrize(
    ("window", "chunk", "kinds"), [(4, 8, (WindowMask, ChunkMask)), (None, 8, (ChunkMask,)), (4, None, (WindowMask,))]
)
def test_masks_of_windows_and_of_chunks_are_told_apart(window: Any, chunk: Any, kinds: tuple[type, ...]) -> None:
    transformers.register()
    config = llama().config
    config._attn_implementation, config.sliding_window, config.attention_chunk_size = transformers.NAME, window, chunk
    make = {WindowMask: create_sliding_window_causal_mask, ChunkMask: create_chunked_causal_mask}
    sizes = {WindowMask: window, ChunkMask: chunk}
    for kind in kinds:
        mask = make[kind](config, torch.zeros(1, 6, 32), None, None, torch.arange(6)[None])
        assert type(mask) is kind and mask == sizes[kind]


def test_a_mask_of_a_size_that_two_kinds_have_is_refused() -> None:
    transformers.register()
    config = llama().config
    config._attn_implementation, config.sliding_window, config.attention_chunk_size = transformers.NAME, 4, 4
    mask = create_chunked_causal_mask(config, torch.zeros(1, 6, 32), None, None, torch.arange(6)[None])
    assert mask == "a mask of chunks or windows of 4 tokens"


class Incomparable:
    """Asked whether it is 0, it raises."""

    def __ne__(self, other: object) -> bool:
        raise TypeError("no number")


class Starred(LlamaForCausalLM):  # type: ignore[misc]
    """Names none of its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


Wrong = tuple[str, Callable[[], PreTrainedModel], Callable[[Tensor, Tensor], dict[str, Any]]]
WRONG: list[Wrong] = [  # the error, the model, and what is wrong in its call, made of its tokens and positions
    ("attention_mask must be None or this", llama, lambda tokens, _: {"attention_mask": 2 * torch.ones_like(tokens)}),
    ("dropout of attention must be 0, got 0.1", lambda: llama(attention_dropout=0.1), lambda *_: {}),
    ("position_ids must be", llama, lambda tokens, _: {"position_ids": torch.arange(tokens.shape[1])[None] + 1}),
    ("rope_type must not depend", lambda: llama(rope_parameters=DYNAMIC), lambda *_: {}),
    ("use_cache must be left out", llama, lambda *_: {"use_cache": True}),
    ("past_key_values must be left out", llama, lambda *_: {"past_key_values": DynamicCache()}),
    ("output_attentions must be left out", llama, lambda *_: {"output_attentions": True}),
    ("labels must be left out", llama, lambda tokens, _: {"labels": tokens}),
    ("output_router_logits must be left out", llama, lambda *_: {"output_router_logits": True}),
    ("logits_to_keep must be left out", llama, lambda *_: {"logits_to_keep": 1}),
    ("cu_seq_lens_q must be left out", llama, lambda *_: {"cu_seq_lens_q": torch.tensor([0, 5, 12])}),
    ("softcap must be left out", llama, lambda *_: {"softcap": 30.0}),
    ("s_aux must be left out", llama, lambda *_: {"s_aux": torch.zeros(4)}),
    ("rank 1: no number", llama, lambda *_: {"use_cache": Incomparable()}),  # of the model's call
    ("rank 1: no number", llama, lambda *_: {"cu_seq_lens_q": Incomparable()}),  # of a layer's
    ("positional arguments must be left out", lambda: Starred(LlamaConfig(**SIZES)), lambda *_: {}),
    ("pattern must be None for a layer with a sliding window of 5", windowed, lambda *_: {"pattern": LONGNET}),
]


def call(wrong: Wrong, tokens: Tensor, context: ContextParallel) -> float:
    """Call a model, and return its mean logit."""
    _, make, change = wrong
    model, arguments = transformers.prepare(make(), compare=False).train(), change(tokens, context.positions)
    given = {"position_ids": context.positions[None], "context": context} | arguments
    return float(model(tokens, **given).logits.mean())


def _refuse(number: int) -> None:
    """Rank 1 alone is wrong. Its context group is told, and can be used afterwards; the other one goes on."""
    example, rank, wrong = Example("together"), torch.distributed.get_rank(), WRONG[number]
    right: Wrong = ("", llama, lambda *_: {})
    (batch,) = example.batches(0, example.handle())
    if rank in (0, 1):
        with pytest.raises((ValueError, NotImplementedError, TypeError), match=wrong[0]):
            call(wrong if rank == 1 else right, batch.tokens, batch.context)
    assert math.isfinite(call(right, batch.tokens, batch.context))


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[wrong[0] for wrong in WRONG])
def test_refuses_wrong_calls_of_one_rank_on_every_rank(ranks: Ranks, number: int) -> None:
    ranks(4).run(_refuse, number)


def test_a_call_without_a_handle_is_refused() -> None:
    with pytest.raises(ValueError, match="context must be given to the model's call"):
        transformers.prepare(llama(), compare=False)(torch.zeros(1, 4, dtype=torch.int64))
