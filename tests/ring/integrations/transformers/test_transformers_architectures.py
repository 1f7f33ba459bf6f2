"""Architectures with sinks, softcaps, head dims of values, chunks and temperatures: trained as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hugging_face
from sweep_transformers import Double, weight
from torch import Tensor
from transformers import PreTrainedModel

from ring import Layout
from ring.integrations.transformers import prepare
from ring.nn import ContextParallel, shard_batch
from tests.support.ranks import Ranks

NEAR = 1e-11  # of the greatest magnitude, in fp64
N, VOCABULARY = 26, 40
DOCUMENTS = (12, 1, 13)
FEW = 3  # tokens on four ranks
Packs = tuple[tuple[int, ...], ...]  # lengths of documents of each
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
HALF = {"head_dim": 6, "num_hidden_layers": 2}
WINDOWS = HALF | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_hidden_layers": 2,
}  # fmt: skip
LATENT = ROUTED | {
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
CHUNKS = MIXED | {
    "head_dim": 6, "num_hidden_layers": 3, "intermediate_size_mlp": 32, "moe_layers": [1], "attention_chunk_size": 5,
    "no_rope_layers": [1, 0, 1], "floor_scale": 3, "attn_scale": 0.5,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", MIXED | WINDOWS),
    "granite_swa": ("GraniteSWA", WINDOWS),
    "gemma2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}),
    "vaultgemma": ("VaultGemma", WINDOWS | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}),
    "gemma3": ("Gemma3", WINDOWS),
    "deepseek_v2": ("DeepseekV2", LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "glm4": ("Glm4", HALF),
    "glm4_moe": ("Glm4Moe", ROUTED | HALF),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        WINDOWS | {
            "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1, "num_key_value_heads": 1,
        },
    ),
    "llama4_text": ("Llama4", CHUNKS),
}  # fmt: skip


def make(name: str, **changes: Any) -> PreTrainedModel:
    """Return a model in fp64 whose parameters are all drawn."""
    kind, own = ARCHITECTURES[name]
    suffix = "TextConfig" if kind in ("Gemma3", "Llama4") else "Config"
    config = getattr(hugging_face, f"{kind}{suffix}")(**SIZES | own | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    draw = torch.Generator().manual_seed(11)
    made: PreTrainedModel = getattr(hugging_face, f"{kind}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for x in made.parameters():
            x.copy_(torch.randn(x.shape, dtype=x.dtype, generator=draw) * (0.3 if x.dim() > 1 else 1.0))
    return made


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, N), generator=torch.Generator().manual_seed(5))


def step(logits: Tensor, weights: Tensor, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients of a loss of weighted logits."""
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}


def whole(name: str, documents: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute logits and gradients in one process, each document by itself."""
    model, parts = make(name), tokens()[:, : sum(documents)].split(documents, 1)
    with Double():
        logits = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        return logits.detach(), step(logits, weight("logits", logits.shape), model)


def _sharded(name: str, kind: str, packs: Packs) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Rows of logits, and gradients that are summed over ranks, of each pack of documents."""
    model, results = prepare(make(name)), []
    with Double():
        for documents in packs:
            n = sum(documents)
            context = ContextParallel(getattr(Layout, kind)(n, dist.get_world_size()))
            batch = shard_batch(context, tokens()[:, :n], documents=documents if len(documents) > 1 else None)
            logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
            grads = step(logits, context.shard(weight("logits", torch.Size((2, n, VOCABULARY)))), model)
            for grad in grads.values():
                dist.all_reduce(grad)
            results.append((logits.detach(), grads))
    return results


def assert_near(found: Tensor, exact: Tensor, largest: float, what: str) -> None:
    assert found.shape == exact.shape and bool(((found - exact).abs() <= NEAR * largest).all()), what


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "world", "kind", "packs"),
    [
        *((name, 4, "zigzag", ((N,), DOCUMENTS)) for name in ARCHITECTURES),
        *((name, 2, "contiguous", ((N,), DOCUMENTS)) for name in ARCHITECTURES),
        *((name, 4, "zigzag", ((FEW,),)) for name in ("gpt_oss", "deepseek_v3", "llama4_text")),
    ],
)
def test_an_architecture_is_as_in_one_process(ranks: Ranks, name: str, world: int, kind: str, packs: Packs) -> None:
    found = ranks(world).run(_sharded, name, kind, packs)
    for number, documents in enumerate(packs):
        layout, (logits, exact) = getattr(Layout, kind)(sum(documents), world), whole(name, documents)
        largest = max(float(x.abs().max()) for x in exact.values())
        for rank, results in enumerate(found):
            shard, grads = results[number]
            assert_near(shard, layout.shard(logits, rank, 1), float(logits.abs().max()), "logits")
            for parameter, x in exact.items():
                assert_near(grads[parameter], x, largest, parameter)


WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"sliding_window": N}),
    ("llama4_text", {"attention_chunk_size": N}),
    ("llama4_text", {"attn_temperature_tuning": False}),
]


@pytest.mark.parametrize(("name", "changes"), WITHOUT)
def test_the_examples_have_what_they_are_for(name: str, changes: dict[str, Any]) -> None:
    with torch.no_grad():
        assert (make(name)(tokens()).logits - make(name, **changes)(tokens()).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa", "mimo_v2_flash"])
def test_sinks_have_gradients(name: str) -> None:
    sinks = [x for parameter, x in whole(name, (N,))[1].items() if parameter.endswith("sinks")]
    assert sinks and all(float(x.abs().min()) > 1e-6 for x in sinks)


def test_chunks_begin_in_each_document_as_in_transformers() -> None:
    """The temperature alone counts on, which would make a document another one in a pack."""
    model, positions = (
        make("llama4_text", attn_temperature_tuning=False),
        torch.cat([torch.arange(n) for n in DOCUMENTS]),
    )
    with torch.no_grad(), Double():
        packed = model(tokens(1), position_ids=positions[None], use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in tokens(1).split(DOCUMENTS, 1)], 1)
    assert_near(packed, alone, float(alone.abs().max()), "logits")


LEFT = [[0] * 3 + [1] * (N - 3)] * 2
RIGHT = [[1] * N, [1] * 17 + [0] * (N - 17)]


def _padded(name: str, mask: list[list[int]]) -> Tensor:
    context = ContextParallel(Layout.zigzag(N, 4))
    batch = shard_batch(context, tokens(), attention_mask=torch.tensor(mask))
    model = prepare(make(name))
    with torch.no_grad(), Double():
        out: Tensor = model(
            batch.tokens, position_ids=batch.positions[None], context=batch.context, **batch.others
        ).logits
    return out


@pytest.mark.ranks
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_padded_rows_are_as_in_one_process(ranks: Ranks, name: str, mask: list[list[int]]) -> None:
    real, model = torch.tensor(mask), make(name)
    with torch.no_grad(), Double():
        exact = model(tokens(), attention_mask=real, position_ids=torch.arange(N)[None], use_cache=False).logits
    layout = Layout.zigzag(N, 4)
    for rank, out in enumerate(ranks(4).run(_padded, name, mask)):
        seen = layout.shard(real, rank, 1) > 0
        assert_near(out[seen], layout.shard(exact, rank, 1)[seen], float(exact.abs().max()), "logits")
