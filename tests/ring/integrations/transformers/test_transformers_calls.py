"""Calls of prepared models of transformers as users make them: masks, positions, ranks without tokens, and back."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    EsmConfig,
    EsmForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
)

from reference import Pattern
from ring import Layout
from ring.comm.transport import SoloTransport
from ring.integrations import transformers
from ring.integrations.wrappers import ddp
from ring.nn import ContextParallel, gather, shard_batch
from tests.support.framework_example import EXACT
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {
    "vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
ABSOLUTE: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2}),
    "window": (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 5}),
    "roberta": (RobertaConfig, RobertaForMaskedLM, ABSOLUTE),
    "roberta, causal": (RobertaConfig, RobertaForCausalLM, ABSOLUTE | {"is_decoder": True}),
    "opt": (OPTConfig, OPTForCausalLM, {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "esm": (EsmConfig, EsmForMaskedLM, ABSOLUTE | {"position_embedding_type": "rotary", "mask_token_id": 2}),
    "modernbert": (ModernBertConfig, ModernBertForMaskedLM, {"layer_types": ["full_attention"] * 2}),
    "two-sided": (
        ModernBertConfig,
        ModernBertForMaskedLM,
        {"layer_types": ["sliding_attention", "full_attention"], "local_attention": 6},
    ),
    "qwen": (Qwen2VLTextConfig, Qwen2VLTextModel, {"num_key_value_heads": 2, "rope_parameters": AXES}),
}
FIRST = {"roberta": 2, "roberta, causal": 2}  # the first position of one process, if it is not 0


def make(family: str) -> PreTrainedModel:
    config, model, changes = MODELS[family]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        made: PreTrainedModel = model(config(**SIZES | changes)).double().eval()
    return made


def tokens(rows: int, n: int) -> Tensor:
    return torch.randint(3, 19, (rows, n), generator=torch.Generator().manual_seed(5))


def outputs(model: PreTrainedModel, x: Tensor, **arguments: Any) -> Tensor:
    out: Tensor = model(x, **arguments)[0]
    return out


N = 24
ONES = [[1] * N] * 2
RIGHT = [[1] * N, [1] * 17 + [0] * 7]
LEFT = [[0] * 5 + [1] * (N - 5)] * 2
HOLES = [[1] * 4 + [0] * 3 + [1] * 6 + [0] + [1] * (N - 14)]
BOTH = [[0] * 3 + [1] * 10 + [0] * (N - 13)] * 2
PACKED = (9, 15)
EDGES = [[0] * 2 + [1] * 7 + [1] * 12 + [0] * 3]


def _run(
    family: str, mask: list[list[int]], documents: tuple[int, ...] | None = None, compare: bool = True, **extra: Any
) -> Tensor:
    """Outputs of the whole sequence."""
    context = ContextParallel(Layout.zigzag(N, 4))
    batch = shard_batch(context, tokens(len(mask), N), documents=documents, attention_mask=torch.tensor(mask))
    positions = batch.positions[None]
    given = {"position_ids": positions, "context": batch.context, **batch.others} | extra
    with torch.no_grad():
        return gather(
            batch.context, outputs(transformers.prepare(make(family), compare=compare), batch.tokens, **given)
        )


@pytest.mark.parametrize(
    ("family", "mask"),
    [
        *((family, ONES) for family in MODELS),
        ("llama", RIGHT), ("window", RIGHT), ("llama", LEFT), ("window", LEFT), ("roberta", LEFT),
        ("llama", BOTH), ("modernbert", BOTH), ("two-sided", BOTH), ("esm", BOTH),
    ],
)  # fmt: skip
def test_tokens_do_not_see_padding(ranks: Ranks, family: str, mask: list[list[int]]) -> None:
    positions, real = torch.arange(N)[None] + FIRST.get(family, 0), torch.tensor(mask)
    exact = outputs(make(family), tokens(len(mask), N), position_ids=positions, attention_mask=real).detach()
    for out in ranks(4).run(_run, family, mask):
        torch.testing.assert_close(out[real > 0], exact[real > 0], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("family", ["llama", "modernbert", "two-sided"])
def test_padding_within_packed_documents(ranks: Ranks, family: str) -> None:
    x, real, positions = tokens(1, N), torch.tensor(EDGES), torch.cat([torch.arange(n) for n in PACKED])[None]
    parts = zip(*(whole.split(PACKED, 1) for whole in (x, positions, real)), strict=True)
    exact = torch.cat([outputs(make(family), a, position_ids=b, attention_mask=c).detach() for a, b, c in parts], 1)
    for out in ranks(4).run(_run, family, EDGES, PACKED):
        torch.testing.assert_close(out[real > 0], exact[real > 0], rtol=EXACT, atol=EXACT)


def _counted(
    family: str, documents: tuple[int, ...] | None, pads: bool, mask: list[list[int]] | None, own: bool
) -> Tensor:
    context = ContextParallel(Layout.zigzag(N, 4))
    others: dict[str, Any] = {} if mask is None else {"attention_mask": torch.tensor(mask)}
    batch = shard_batch(context, padded_text(pads), documents=documents, **others)
    positions = context.shard((torch.tensor(mask).cumsum(1) - 1).clamp(min=0)) if own else batch.positions[None]
    model = copy.deepcopy(transformers.prepare(make(family)))
    with torch.no_grad():
        out = model(batch.tokens, position_ids=positions, context=batch.context, **batch.others)[0]
    return gather(batch.context, out)


def padded_text(pads: bool) -> Tensor:
    x = tokens(2, N)
    x[0, 3] = x[1, 9] = x[1, 20] = 1 if pads else 4
    return x


@pytest.mark.parametrize("family", ["opt", "roberta", "roberta, causal"])
@pytest.mark.parametrize(
    ("documents", "pads", "mask", "own"),
    [(None, True, None, False), (PACKED, True, None, False), (None, False, LEFT, False), (None, True, LEFT, True)],
)
def test_positions_are_counted_as_in_one_process(
    ranks: Ranks, family: str, documents: tuple[int, ...] | None, pads: bool, mask: list[list[int]] | None, own: bool
) -> None:
    real = torch.ones(2, N, dtype=torch.int64) if mask is None else torch.tensor(mask)
    parts = zip(*(x.split(documents or (N,), 1) for x in (padded_text(pads), real)), strict=True)
    exact = torch.cat([outputs(make(family), x, attention_mask=part).detach() for x, part in parts], 1)
    for out in ranks(4).run(_counted, family, documents, pads, mask, own):
        torch.testing.assert_close(out[real > 0], exact[real > 0], rtol=EXACT, atol=EXACT)


def test_an_example_with_a_mask_shows_how_positions_are_counted() -> None:
    x, mask, context = tokens(1, N), torch.tensor(LEFT[:1]), ContextParallel(Layout.contiguous(N, 1))
    example = {"input_ids": x, "attention_mask": torch.ones_like(x)}
    model = transformers.prepare(make("opt"), SoloTransport(), example=example)
    out = outputs(model, x, position_ids=context.positions[None], context=context, attention_mask=mask)
    exact = outputs(make("opt"), x, attention_mask=mask)
    torch.testing.assert_close(out[mask > 0], exact[mask > 0], rtol=EXACT, atol=EXACT)


LONGNET = Pattern.longnet((6, 16), (1, 2), 4, causal=True)
NOT_TAKEN: list[tuple[str, str, list[list[int]], dict[str, Any]]] = [
    ("zeros on the right, or, without a pattern, in the same", "llama", [LEFT[0], ONES[0]], {}),
    ("zeros on the right, or, without a pattern, in the same", "llama", LEFT, {"pattern": LONGNET}),
    ("zeros in the same places of every row", "roberta", RIGHT, {}),
    *(("before or behind the tokens of a document", family, HOLES, {}) for family in ("llama", "roberta")),
    *(("zeros behind the tokens for a model that prepare did not compare", x, LEFT, {}) for x in ("opt", "roberta")),
    ("attention_mask must be None or this rank's shard .* other values", "llama", [[1] * 20 + [2] * 4], {}),
    *(
        (rf"attention_mask must be .* \(batch, 6\), got shape \({text}, 24\)", "llama", ONES, {"attention_mask": mask})
        for text, mask in (("1", torch.ones(1, N)), ("1, 1, 6", torch.ones(1, 1, 6, N)))
    ),
    ("position_ids must be context.positions.* got others.*Rows of different documents must be one row, tokens.view",
     "llama", ONES, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])}),
    ("position_ids must be context.positions.* got others",
     "roberta", ONES, {"position_ids": 2 + torch.arange(6)[None]}),
    (r"position_ids must be \(1 or batch, 6\).*, got \(3, 2, 6\)",
     "llama", ONES, {"position_ids": torch.ones(3, 2, 6)}),
    (r"time, height and width must follow those of the text, \(4, batch, 6\): .*, got \(3, 2, 6\)",
     "qwen", ONES, {"position_ids": torch.ones(3, 2, 6)}),
    ("position_ids must be context.positions.* got others", "qwen", ONES, {"position_ids": torch.ones(4, 2, 6)}),
]  # fmt: skip


def _refuse(number: int, alone: bool) -> None:
    """The same on every rank, or wrong on rank 1 alone; the group is usable afterwards."""
    words, family, mask, extra = NOT_TAKEN[number]
    wrong = not alone or dist.get_rank() == 1
    with pytest.raises((ValueError, NotImplementedError), match=words):
        _run(family, mask, compare=False, **extra if wrong else {})
    assert _run("llama", ONES, compare=False).isfinite().all()


@pytest.mark.parametrize("number", range(len(NOT_TAKEN)))
def test_refuses_unsupported_arguments_on_every_rank(ranks: Ranks, number: int) -> None:
    for alone in (False, True)[: 2 if set(NOT_TAKEN[number][3]) - {"pattern"} else 1]:
        ranks(4).run(_refuse, number, alone)


def _no_mask_on_one() -> None:
    with pytest.raises(ValueError, match="rank 1"):
        _run("llama", RIGHT, compare=False, **{"attention_mask": None} if dist.get_rank() == 1 else {})


def test_a_mask_that_one_rank_does_not_give_is_refused(ranks: Ranks) -> None:
    ranks(4).run(_no_mask_on_one)


def axes() -> Tensor:
    """Positions of time, height and width (3, 1, N): text, an image of 2 by 3, text."""
    image = [[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6] * 2]
    return torch.tensor([[*range(4), *part, *range(7, 7 + N - 10)] for part in image])[:, None]


def _run_axes() -> Tensor:
    context = ContextParallel(Layout.zigzag(N, 4))
    batch = shard_batch(context, tokens(1, N))
    positions = torch.cat((batch.positions.expand(1, *batch.tokens.shape), context.shard(axes(), 2)))
    with torch.no_grad():
        model = transformers.prepare(make("qwen"))
        return gather(context, outputs(model, batch.tokens, position_ids=positions, context=context))


def test_positions_of_three_axes_follow_those_of_the_text(ranks: Ranks) -> None:
    exact = outputs(make("qwen"), tokens(1, N), position_ids=axes()).detach()
    assert (exact - outputs(make("qwen"), tokens(1, N))).abs().max() > 1e-6, "axes that have no effect"
    for out in ranks(4).run(_run_axes):
        torch.testing.assert_close(out, exact, rtol=EXACT, atol=EXACT)


FEW = 3  # tokens on four ranks


def gradients(model: PreTrainedModel, x: Tensor, **arguments: Any) -> list[Tensor]:
    out = outputs(model.train(), x, **arguments)
    assert out.shape[:2] == x.shape
    out.square().sum().backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def _train_few(family: str) -> list[Tensor]:
    context = ContextParallel(Layout.zigzag(FEW, 4))
    batch = shard_batch(context, tokens(2, FEW), attention_mask=torch.ones(2, FEW))
    positions = batch.positions[None]
    model = transformers.prepare(make(family))
    grads = gradients(model, batch.tokens, position_ids=positions, context=context, **batch.others)
    for grad in grads:
        dist.all_reduce(grad)
    return grads


@pytest.mark.parametrize("family", ["window", "roberta", "qwen"])
def test_ranks_without_tokens_take_part(ranks: Ranks, family: str) -> None:
    exact = gradients(make(family), tokens(2, FEW), position_ids=torch.arange(FEW)[None] + FIRST.get(family, 0))
    for grads in ranks(4).run(_train_few, family):
        torch.testing.assert_close(grads, exact, rtol=1e-11, atol=1e-11)


def test_a_prepared_model_generates_and_is_saved_as_before(tmp_path: Path) -> None:
    plain, x, alone = make("llama"), tokens(1, 5), SoloTransport()
    model = transformers.prepare(transformers.prepare(make("llama"), alone), alone)
    for name, saved in (("plain", plain), ("prepared", model)):
        saved.save_pretrained(tmp_path / name)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "prepared")]
    assert configs[0] == configs[1] and configs[1]["use_cache"] is True
    arguments: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    wanted = plain.generate(x, **arguments)
    context = ContextParallel(Layout.contiguous(5, 1))
    for given in ({}, {"context": context, "position_ids": context.positions[None]}):
        with pytest.raises(ValueError, match=r"generate must be called within restored\(model\)"):
            pickled(model).generate(x, **arguments, **given)
    for _ in range(2):
        with transformers.restored(model) as own:
            assert own is model and model.config._attn_implementation == plain.config._attn_implementation
            assert torch.equal(model.generate(x, **arguments), wanted)
            assert model(x).past_key_values is not None
            twin = copy.deepcopy(model)
            with pytest.raises(ValueError, match="context must be left out while .* 'sdpa'"):
                model(x, context=context)
        assert model(x, position_ids=context.positions[None], context=context).past_key_values is None
    with pytest.raises(ValueError, match="copies that are made there.* Call and copy the model outside of that block"):
        twin(x, context=context)
    with pytest.raises(ValueError, match="model must be a prepared one"), transformers.restored(plain):
        pass


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded: PreTrainedModel = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled])
@pytest.mark.parametrize("family", ["roberta", "opt", "llama"])
def test_a_copy_is_a_model_of_its_own(twin_of: Any, family: str) -> None:
    x, context = tokens(1, 7), ContextParallel(Layout.contiguous(7, 1))
    given: dict[str, Any] = {"position_ids": context.positions[None], "context": context}
    model, exact = transformers.prepare(make(family), SoloTransport()), outputs(make(family), x)
    twin = twin_of(model)
    with transformers.restored(model):
        torch.testing.assert_close(outputs(twin, x, **given), exact, rtol=EXACT, atol=EXACT)
    with transformers.restored(twin):
        torch.testing.assert_close(outputs(twin, x), exact, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(outputs(model, x, **given), exact, rtol=EXACT, atol=EXACT)
    base, exact = twin.base_model, outputs(make(family).base_model, x)
    torch.testing.assert_close(outputs(base, x, **given), exact, rtol=EXACT, atol=EXACT)


def _not_prepared() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    model, context = ddp.wrap(make("llama"), mesh), ContextParallel(Layout.zigzag(N, 2), mesh["context"])
    batch = shard_batch(context, tokens(1, N))
    model(batch.tokens)  # a call without a handle says nothing of those with one
    called = said(lambda: model(batch.tokens, position_ids=batch.positions[None], context=context))
    return called + said(lambda: transformers.prepare(model, mesh["context"]))


def test_a_wrapped_model_that_is_not_prepared_is_refused(ranks: Ranks) -> None:
    """Transformers takes any keyword, and gives it to an attention that ignores it."""
    for answer in ranks(2).run(_not_prepared):
        assert "model must be prepared before it is wrapped, got one whose attention, 'sdpa', ignores context" in answer
        assert "model must be one of transformers, not yet wrapped, got a DistributedDataParallel" in answer


def test_refuses_a_model_that_shares_a_prepared_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "_registered_alone", set())
    x, context = tokens(1, 7), ContextParallel(Layout.contiguous(7, 1))
    given: dict[str, Any] = {"position_ids": context.positions[None], "context": context}
    model = transformers.prepare(make("roberta"), SoloTransport())
    other = type(model)(copy.deepcopy(model.config)).double().eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="model must be prepared, got a RobertaSelfAttention of another"):
        outputs(other, x, **given)
    transformers.prepare(other, SoloTransport())
    assert outputs(other, x, **given).equal(outputs(model, x, **given))
    transformers.register()
    outputs(type(model)(copy.deepcopy(model.config)).double().eval(), x, **given)
