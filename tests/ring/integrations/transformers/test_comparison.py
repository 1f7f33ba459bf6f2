"""Comparison of a model with one process in `prepare`: what mixes tokens is named, what does not is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.functional import pad
from transformers import (
    BertConfig,
    BertModel,
    BloomForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MPNetForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    XGLMForCausalLM,
)

from ring import Layout
from ring.comm.transport import SoloTransport
from ring.integrations.transformers import prepare
from ring.nn import ContextParallel, gather, shard_batch
from tests.support.ranks import Ranks

WIDTH = 16
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 1,
}  # fmt: skip


class Sum(nn.Module):
    """Sums all tokens before, as a state does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / 8


class Shift(nn.Module):
    """Returns the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return pad(x, (0, 0, 1, 0))[:, :-1]


class Mean(nn.Module):
    """Adds the mean over tokens to each."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


class Gated(nn.Module):
    """Shifts tokens, behind a gate that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * pad(x, (0, 0, 1, 0))[:, :-1]


class Blocks(nn.Module):
    """Averages whole blocks of 32 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.shape[1] // 32
        means = x[:, : 32 * blocks].unflatten(1, (blocks, 32)).mean(2, keepdim=True).expand(-1, -1, 32, -1)
        return pad(means.flatten(1, 2), (0, 0, 0, x.shape[1] - 32 * blocks))


class Failing(nn.Module):
    """Fails on rank 1, when it gets a shard, or the whole sequence."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1 and x.shape[1] in ((23,) if self.whole else (11, 12)):
            raise RuntimeError("no memory")
        return x


class Auxiliary(LlamaForCausalLM):  # type: ignore[misc]
    """Returns a mean over tokens beside its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out["aux_loss"] = out.logits.square().mean()
        return out


class MaskReader(LlamaForCausalLM):  # type: ignore[misc]
    """Adds the number of tokens that its mask marks."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        out = super().forward(*args, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None:
            out["logits"] = out.logits + attention_mask.sum()
        return out


class Within(PreTrainedModel):  # type: ignore[misc]
    """Halves its input: a model without attention."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Beside(nn.Module):
    """Adds a module to another."""

    def __init__(self, inner: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.inner, self.mixer = inner, mixer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.mixer(x)
        return out


def llama(mixer: nn.Module | None = None, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
    if mixer is not None:
        layer = model.model.layers[0]
        layer.mlp = Beside(layer.mlp, mixer)
    return model


def failing_head() -> LlamaForCausalLM:
    model = llama()
    model.lm_head = nn.Sequential(Failing(False), model.lm_head)
    return model


def mixtral(**changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(3)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, **changes))


def indexing() -> DeepseekV32ForCausalLM:
    changes = {"num_key_value_heads": 4, "index_topk": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 8}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**SIZES | changes))


def roberta() -> RobertaForMaskedLM:
    torch.manual_seed(3)
    return RobertaForMaskedLM(RobertaConfig(**SIZES))


def not_a_number() -> LlamaForCausalLM:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    return model


def distributed() -> LlamaForCausalLM:
    model = llama()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Replicate()]))
    return model


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return llama()


def other_weights() -> LlamaForCausalLM:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += dist.get_rank()
    return model


IN_LAYER = "model.layers.0.mlp.mixer"
Refused = tuple[Callable[[], Any], str]
REFUSED: dict[str, Refused] = {
    "sum": (lambda: llama(Sum()), f"the output of {IN_LAYER} (Sum) differs, whose inputs agree: it mixes"),
    "shift": (lambda: llama(Shift()), f"the output of {IN_LAYER} (Shift) differs"),
    "mean": (lambda: llama(Mean()), f"the output of {IN_LAYER} (Mean) differs, whose inputs agree: it is a function"),
    "gate of 0": (lambda: llama(Gated()), f"the output of {IN_LAYER} (Gated) differs"),
    "bf16": (lambda: llama(Shift()).bfloat16(), f"the output of {IN_LAYER} (Shift) differs"),
    "pooled": (lambda: BertModel(BertConfig(**SIZES)), "the output of pooler (BertPooler) differs"),
    "last token": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES)),
        "the output logits of the model itself (LlamaForSequenceClassification), beside its submodules, differs",
    ),
    "auxiliary loss": (lambda: Auxiliary(LlamaConfig(**SIZES)), "the output aux_loss of the model itself (Auxiliary)"),
    "router logits": (lambda: mixtral(output_router_logits=True), "output_router_logits must be left out"),
    "dropped scaling": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "rope_type must not depend on the positions of a rank",
    ),
    "error within the layers": (lambda: llama(Failing(False)), f"RuntimeError: no memory in {IN_LAYER} (Failing)"),
    "an indexer that reads its mask": (indexing, "not subscriptable in model.layers.0.self_attn (DeepseekV32"),
    "a state, without attention": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=8, state_size=2, num_hidden_layers=1)),
        "the output of backbone.layers.0.mixer (MambaMixer) differs",
    ),
    "error after the layers": (failing_head, "rank 1: model must take position_ids= and context="),
    "error in one process": (lambda: llama(Failing(True)), "rank 1: model must run 23 tokens in one process"),
    "other weights": (other_weights, "torch.manual_seed, must be the same on every rank: rank 0 has model.layers.1"),
    "not a number": (not_a_number, "model must compute numbers, got NaN in its output logits"),
    "two stacks": (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_ff=24, num_layers=1, num_heads=2)),
        "model must be an encoder or a decoder, got T5ForConditionalGeneration",
    ),
    "images": (lambda: ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1)), "model must take input_ids"),
    "DTensor": (distributed, "lm_head.weight sharded already, as a DTensor"),
    "blocks of the configuration": (
        lambda: llama(Blocks(), compress_rates={"some": 4, "all": 32}),
        f"the output of {IN_LAYER} (Blocks) differs",
    ),
    "more blocks than an example": (
        lambda: llama(index_block_size=64, index_topk_blocks=16),
        "must have more than 1024 tokens, since the configuration has index_block_size=64 and index_topk_blocks=16",
    ),
    "meta": (on_meta, "model.embed_tokens.weight on the meta device"),
}


def state(model: Any) -> list[Any]:
    """Properties that a refused model keeps."""
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    settings = [model.config._attn_implementation, getattr(model.config, "use_cache", None)]
    return [modes, hooks, settings, torch.get_rng_state().tolist(), torch.is_grad_enabled()]


def _refuse(kind: str) -> str:
    """The error; afterwards the group and the model can be used."""
    make, _ = REFUSED[kind]
    torch.manual_seed(7)
    model = make().train()
    before = state(model)
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        prepare(model, dist.group.WORLD)
    assert state(model) == before
    prepare(llama(), dist.group.WORLD)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_a_differing_model_by_the_module_on_every_rank(ranks: Ranks, kind: str) -> None:
    messages = ranks(2).run(_refuse, kind)
    assert REFUSED[kind][1] in messages[0] and len(set(messages)) == 1


TAKEN: dict[str, Callable[[], Any]] = {
    "fp64": lambda: llama().double(),
    "fp32": llama,
    "bf16": lambda: llama().bfloat16(),
    "fp16": lambda: llama().half(),
    "experts": mixtral,
    "positions after padding": roberta,
    "a model in its layers": lambda: llama(Within(LlamaConfig())),
    "no pooler": lambda: BertModel(BertConfig(**SIZES), add_pooling_layer=False),
    "positions of GPT-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)),
    "blocks that the example does not fill": lambda: llama(Blocks()),
}


def _take(kind: str) -> None:
    torch.manual_seed(3)
    model = TAKEN[kind]().train()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    assert prepare(model, dist.group.WORLD) is model
    assert all(
        torch.equal(x, weights[name]) and x.dtype == weights[name].dtype for name, x in model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), random) and modes == [module.training for module in model.modules()]
    assert model.config._attn_implementation == "ring"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "kind"), [*((2, kind) for kind in TAKEN), (4, "fp32"), (4, "positions after padding")]
)
def test_a_model_without_mixing_is_taken(ranks: Ranks, world: int, kind: str) -> None:
    ranks(world).run(_take, kind)


def _run_roberta() -> tuple[Tensor, Tensor]:
    model = roberta().double().eval()
    ids = torch.randint(3, 40, (2, 23), generator=torch.Generator().manual_seed(1))
    whole = model(ids).logits.detach()
    prepare(model, dist.group.WORLD)
    context = ContextParallel(Layout.zigzag(23, 2))
    batch = shard_batch(context, ids)
    return gather(context, model(batch.tokens, position_ids=batch.positions[None], context=context).logits), whole


@pytest.mark.ranks
def test_positions_that_begin_after_padding_are_carried_over(ranks: Ranks) -> None:
    for logits, whole in ranks(2).run(_run_roberta):
        torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)


def _refuse_example(example: dict[str, Tensor]) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        prepare(llama(Blocks()), dist.group.WORLD, example=example)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"input_ids": torch.arange(66)[None] % 40}, f"of 66 tokens, on all ranks, the output of {IN_LAYER} (Blocks)"),
        ({"inputs_embeds": torch.ones(2, 66, WIDTH).cumsum(1)}, f"the output of {IN_LAYER} (Blocks)"),
        ({"input_ids": torch.arange(3)[None]}, "example must have at least 4 tokens, two a rank, got 3"),
        ({"pixels": torch.ones(1, 3)}, "example must have input_ids (batch, tokens) or inputs_embeds"),
        ({"input_ids": torch.ones(1, 9).long(), "position_ids": torch.arange(9)[None]}, "and neither position_ids nor"),
        (
            {"input_ids": torch.full((1, 9), 40)},
            "model must run 9 tokens in one process to be compared, got IndexError",
        ),
    ],
)
def test_an_example_of_the_caller(ranks: Ranks, example: dict[str, Tensor], words: str) -> None:
    messages = ranks(2).run(_refuse_example, example)
    assert words in messages[0] and len(set(messages)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "torch.distributed is not initialised; call prepare after init_process_group, or give compare=False"),
        ({"group": SoloTransport(), "compare": False}, "group and example are for the comparison"),
        ({"example": {}, "compare": False}, "group and example are for the comparison"),
    ],
)
def test_refuses_a_comparison_without_ranks(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(llama(), **arguments)


def test_one_rank_shards_nothing_but_documents() -> None:
    prepare(llama(), SoloTransport())
    with pytest.raises(
        NotImplementedError, match=r"packed from documents of \(5, 1, 11\) tokens, on rank 0, the output"
    ):
        prepare(llama(Shift()), SoloTransport())


def test_a_model_that_reads_its_mask_has_no_padding() -> None:
    model = prepare(MaskReader(LlamaConfig(**SIZES)), SoloTransport())
    context, ids = ContextParallel(Layout.contiguous(9, 1)), torch.ones(1, 9, dtype=torch.int64)
    given: dict[str, Any] = {"position_ids": context.positions[None], "context": context}
    model(input_ids=ids, attention_mask=ids, **given)
    with pytest.raises(NotImplementedError, match=r"attention_mask must be None or ones .*logits of .*MaskReader"):
        model(input_ids=ids, attention_mask=ids.index_fill(1, torch.tensor([0]), 0), **given)


@pytest.mark.parametrize(
    "kind, sizes",
    [
        (XGLMForCausalLM, {"d_model": 8, "ffn_dim": 8, "num_layers": 1, "attention_heads": 2}),
        (
            MPNetForMaskedLM,
            {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        (BloomForCausalLM, {"hidden_size": 8, "n_layer": 1, "n_head": 2}),
    ],
)
def test_refuses_irreplaceable_attention_before_comparing(kind: Any, sizes: dict[str, int]) -> None:
    model = kind(kind.config_class(vocab_size=19, **sizes))
    with pytest.raises(
        NotImplementedError, match=f"registry can replace, got a {kind.__name__}, which computes its own"
    ):
        prepare(model, compare=False)
    assert not model._forward_pre_hooks and model.config._attn_implementation == "eager"
