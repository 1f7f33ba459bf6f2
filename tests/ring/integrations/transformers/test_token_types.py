"""Masks that models make of token types, and rows packed as trees: trained as in one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hugging_face
from sweep_transformers import Double, weight
from torch import Tensor
from transformers import PreTrainedModel

from reference import Pattern
from ring import Layout
from ring.comm.transport import SoloTransport
from ring.integrations.transformers import prepare, token_types
from ring.integrations.transformers.call import prepared_call
from ring.nn import ContextParallel, gather, shard_batch
from tests.ring.integrations.transformers.test_transformers_architectures import assert_near, step
from tests.ring.integrations.transformers.test_transformers_calls import make as counting
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

N, VOCABULARY = 26, 60
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "query_pre_attn_scalar": 6,
}  # fmt: skip
WINDOWS = TEXT | {"sliding_window": 5, "layer_types": LAYERS}
IMAGES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SIGLIP = {"vision_config": IMAGES | {"model_type": "siglip_vision_model", "projection_dim": 24}, "projection_dim": 24}
VISION4 = {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 6,
           "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}  # fmt: skip
NONE4 = dict.fromkeys(("vision_config", "audio_config"))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("ForConditionalGeneration", {"text_config": WINDOWS, "vision_config": IMAGES, "mm_tokens_per_image": 4}),
    "Gemma4": ("ForConditionalGeneration", NONE4 | {"text_config": WINDOWS | VISION4}),
    "PaliGemma": ("ForConditionalGeneration", SIGLIP | {"text_config": TEXT | {"model_type": "gemma"}}),
    "PaliGemma 2": ("ForConditionalGeneration", SIGLIP | {"text_config": WINDOWS | {"model_type": "gemma2"}}),
    "HrmText": ("ForCausalLM", TEXT | {"prefix_lm": True, "num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 1}),
}
ONE, PACKED = (N,), (11, 1, 14)


def make(name: str) -> PreTrainedModel:
    head, sizes = MODELS[name]
    kind = name.split(maxsplit=1)[0]
    config = getattr(hugging_face, f"{kind}Config")(
        **sizes, **({"image_token_id": 3} if "vision_config" in sizes else {})
    )
    config._attn_implementation = "eager"
    draw = torch.Generator().manual_seed(11)
    made: PreTrainedModel = getattr(hugging_face, kind + head)(config).double().eval()
    with torch.no_grad():
        for x in made.parameters():
            x.copy_(torch.randn(x.shape, dtype=x.dtype, generator=draw) * (0.3 if x.dim() > 1 else 1.0))
    return made


def tokens(rows: int = 2, n: int = N) -> Tensor:
    return torch.randint(10, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(5))


def typed(name: str, prefix: bool) -> dict[str, Any]:
    """Images, one of them longer than the window, and one across the documents; or a prefix."""
    types = torch.zeros(2, N, dtype=torch.int64)
    if prefix:
        types[:, :9] = 1  # the suffix of PaliGemma has these
    else:
        for begin, end in ((1, 3), (4, 13), (15, 24)):
            types[:, begin:end] = 1
    return {"mm_token_type_ids" if name == "Gemma4" else "token_type_ids": types}


def whole(name: str, documents: tuple[int, ...], prefix: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model, types = make(name), typed(name, prefix)
    parts = zip(tokens().split(documents, 1), *(x.split(documents, 1) for x in types.values()), strict=True)
    with Double():
        logits = torch.cat([model(x, use_cache=False, **dict.fromkeys(types, y)).logits for x, y in parts], 1)
        return logits.detach(), step(logits, weight("logits", logits.shape), model)


def _sharded(name: str, kind: str, packs: Any, prefix: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    model, results = prepare(make(name)), []
    call = prepared_call(model)
    assert call is not None and call.types_refused is None
    with Double():
        for documents in packs:
            context = ContextParallel(getattr(Layout, kind)(N, dist.get_world_size()))
            batch = shard_batch(context, tokens(), documents=documents, **typed(name, prefix))
            logits = model(
                batch.tokens, position_ids=batch.positions[None], context=batch.context, **batch.others
            ).logits
            grads = step(logits, context.shard(weight("logits", torch.Size((2, N, VOCABULARY)))), model)
            for grad in grads.values():
                dist.all_reduce(grad)
            results.append((gather(context, logits.detach()), grads))
    return results


@pytest.mark.parametrize(("world", "kind"), [(1, "contiguous"), (2, "zigzag"), (3, "contiguous")])
@pytest.mark.parametrize(("name", "prefix"), [*((name, False) for name in MODELS), ("HrmText", True)])
def test_masks_of_types_are_those_of_one_process(ranks: Ranks, name: str, prefix: bool, world: int, kind: str) -> None:
    found = ranks(world).run(_sharded, name, kind, (ONE, PACKED), prefix)
    for number, documents in enumerate((ONE, PACKED)):
        logits, exact = whole(name, documents, prefix)
        largest = max(float(x.abs().max()) for x in exact.values())
        for results in found:
            gathered, grads = results[number]
            assert_near(gathered, logits, float(logits.abs().max()), "logits")
            for parameter, x in exact.items():
                assert_near(grads[parameter], x, largest, parameter)


@pytest.mark.parametrize("name", MODELS)
def test_types_matter_in_every_kind_of_layer(name: str) -> None:
    with torch.no_grad():
        plain, some = make(name)(tokens()).logits, make(name)(tokens(), **typed(name, False)).logits
    assert (plain - some).abs().max() > 1e-3


PADDING = {"left": [[0] * 5 + [1] * (N - 5)] * 2, "right": [[1] * (N - 4) + [0] * 4] * 2}


def _padded(name: str, mask: list[list[int]]) -> Tensor:
    context = ContextParallel(Layout.zigzag(N, 2))
    batch = shard_batch(context, tokens(), attention_mask=torch.tensor(mask), **typed(name, False))
    with torch.no_grad(), Double():
        model = prepare(make(name))
        return gather(
            context,
            model(batch.tokens, position_ids=batch.positions[None], context=batch.context, **batch.others).logits,
        )


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", ["Gemma3", "PaliGemma"])
def test_types_and_padding_are_those_of_one_process(ranks: Ranks, name: str, side: str) -> None:
    real = torch.tensor(PADDING[side])
    with torch.no_grad(), Double():
        given = {"attention_mask": real, "position_ids": torch.arange(N)[None]} | typed(name, False)
        exact = make(name)(tokens(), use_cache=False, **given).logits
    for out in ranks(2).run(_padded, name, PADDING[side]):
        assert_near(out[real > 0], exact[real > 0], float(exact.abs().max()), "logits")


def test_a_wrong_mask_of_types_is_found_by_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_types, "_blocks", lambda ids: [])
    model = prepare(make("Gemma3"), SoloTransport())
    given = {"context": ContextParallel(Layout.contiguous(N, 1)), "position_ids": torch.arange(N)[None]}
    with pytest.raises(NotImplementedError, match="token_type_ids must be left out for this model: model must be the"):
        model(tokens(), **given, **typed("Gemma3", False))
    with torch.no_grad():
        assert model(tokens(), **given).logits.isfinite().all()


def different_rows() -> Tensor:
    types = typed("Gemma3", False)["token_type_ids"]
    types[1, 7] = 0
    return types


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("pixel_values must be left out: layers of images", "Gemma3", {"pixel_values": torch.ones(1, 3, 16, 16)}),
    ("token types must be the same in all rows", "Gemma3", {"token_type_ids": different_rows()}),
    (r"must be this rank's shard, \(batch, 13\), got shape \(2, 4\)", "Gemma3", {"token_type_ids": torch.ones(2, 4)}),
    ("pattern must be None for a call with token types", "HrmText", typed("", False) | {"pattern": Pattern.prefix(3)}),
    ("pattern of a tree must be the handle's", "HrmText", {"pattern": Pattern.tree([None, 0], [13, 13])}),
    ("pattern must be None for a layer with a sliding window", "Gemma3", {"pattern": Pattern.prefix(3)}),
]  # fmt: skip


def _refuse(number: int, alone: bool) -> None:
    """The same on every rank, or wrong on rank 1 alone; the group is usable afterwards."""
    words, name, wrong = REFUSED[number]
    context = ContextParallel(Layout.zigzag(N, 2))
    model = prepare(make(name), compare=False)
    same = {k: context.shard(x) if isinstance(x, Tensor) and x.shape[1] == N else x for k, x in wrong.items()}
    given = {"position_ids": context.positions[None], "context": context}
    some = {k: context.shard(x) for k, x in typed(name, False).items()}
    with torch.no_grad():
        with pytest.raises((ValueError, NotImplementedError), match=words):
            model(context.shard(tokens()), **given, **(some if alone and dist.get_rank() == 0 else same))
        assert model(context.shard(tokens()), **given, **some).logits.isfinite().all()


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_types_that_cannot_be_masked_are_refused(ranks: Ranks, number: int) -> None:
    for alone in (False, True)[: 2 if number < 3 else 1]:
        ranks(2).run(_refuse, number, alone)


PARENTS, LENGTHS = [None, 0, 1, 0], [9, 4, 6, 7]


def llama(window: int | None = None) -> PreTrainedModel:
    torch.manual_seed(3)
    kind = "Llama" if window is None else "Mistral"
    sizes = {k: x for k, x in TEXT.items() if k != "query_pre_attn_scalar"} | (
        {} if window is None else {"sliding_window": window}
    )
    made: PreTrainedModel = getattr(hugging_face, f"{kind}ForCausalLM")(getattr(hugging_face, f"{kind}Config")(**sizes))
    return made.double().eval()


def _tree() -> tuple[Tensor, dict[str, Tensor], list[str]]:
    context = ContextParallel(Layout.zigzag(N, dist.get_world_size()))
    batch = shard_batch(context, tokens(1), pattern=Pattern.tree(PARENTS, LENGTHS))
    model, errors = prepare(llama()), []
    for wrong, places in ((model, context), (prepare(llama(5)), batch.context)):
        with pytest.raises(ValueError) as error:
            wrong(batch.tokens, position_ids=places.positions[None], context=batch.context)
        errors.append(str(error.value))
    with Double():
        logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
        grads = step(logits, context.shard(weight("logits", torch.Size((1, N, VOCABULARY)))), model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return gather(context, logits.detach()), grads, errors


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_packed_tree_is_as_its_leaves_alone(ranks: Ranks, world: int) -> None:
    model, weights = llama(), weight("logits", torch.Size((1, N, VOCABULARY)))
    logits, grads = torch.zeros(1, N, VOCABULARY, dtype=torch.float64), dict[str, Any]()
    for rows, own in ((range(19), 0), ([*range(9), *range(19, 26)], 9)):  # the root's gradient counts once
        with Double():
            alone = model(tokens(1)[:, rows], use_cache=False).logits
            logits[:, rows] = alone.detach()
            more = step(alone[:, own:], weights[:, rows][:, own:], model)
        grads = {name: grads.get(name, 0) + x.clone() for name, x in more.items()}
    largest = max(float(x.abs().max()) for x in grads.values())
    for out, found, (places, window) in ranks(world).run(_tree):
        assert_near(out, logits, float(logits.abs().max()), "logits")
        for name, x in grads.items():
            assert_near(found[name], x, largest, name)
        assert "position_ids must be context.positions" in places
        assert "pattern must be plain attention where the handle has a pattern" in window


@pytest.mark.parametrize("family", ["roberta, causal", "opt"])
def test_a_model_that_counts_positions_takes_no_tree(family: str) -> None:
    """OPT counts its mask, where it has one."""
    context = ContextParallel(Layout.contiguous(N, 1)).with_pattern(Pattern.tree(PARENTS, LENGTHS))
    model = prepare(counting(family), SoloTransport())
    given = {"attention_mask": torch.ones(1, N)} if family == "opt" else {}
    with pytest.raises(NotImplementedError, match="pattern of a tree must be left out for a model that counts"):
        model(tokens(1) % 19, position_ids=context.positions[None], context=context, **given)
