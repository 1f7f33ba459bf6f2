"""The attention of Hugging Face's models, by their registry of attention functions.

    model = prepare(LlamaForCausalLM(config))                                   # then ddp.wrap, fsdp.shard, ...
    context = ContextParallel(Layout.zigzag(tokens.shape[1], ranks), mesh["context"])
    batch = shard_batch(context, tokens, next_tokens(tokens))
    logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
    cross_entropy(logits, batch.labels, mesh).backward()

A batch that a collator has flattened, (1, N), whose position_ids begin anew in each document, is sharded with

    shard_batch(context, tokens, next_tokens(tokens), documents=documents_from_positions(position_ids))

The handle goes through the model as a keyword, and so does `pattern`, where another one is wanted than the model's own
dense attention. Layers with a sliding window keep it. What ring attention does not do is refused by name, on every
rank, before a tensor moves: attention masks, dropout of attention, attention in chunks, sinks, softcaps, caches,
attention weights as output, rotary scaling that depends on the rank, and positions that are left to the model, which
would count from the start of each shard. For models of text: masks that a model makes for images are refused, too.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from reference.pattern import Pattern
from ring.nn.context import ContextParallel

NAME = "ring"
FIRST = "layer 0"  # the call of attention in whose place a model's call is refused
# What goes to every attention function and says nothing about the attention.
HARMLESS = {"num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "cache_position"}
RIGHT = "context.positions, as shard_batch gives them"


def register(name: str = NAME) -> None:
    """Make ring attention known to all models as the implementation of this name. Calling it again changes nothing."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, with ring attention, without a cache, and with a look at the arguments of each call."""
    register()
    model.set_attn_implementation(NAME)
    model.config.use_cache = False
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    return model


# What the attention does not see of a model's call, with the reason why it must be left out.
LEFT_OUT = {
    "labels": "the model shifts them within each shard and takes the mean of each: give the logits to cross_entropy",
    "past_key_values": "a cache holds the keys of one shard",
    "output_attentions": "ring attention has no weights to give out",
    "logits_to_keep": "it would keep the last tokens of each shard",
}


def _check_call(model: PreTrainedModel, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    bound = inspect.signature(model.forward).bind_partial(*given, **named)
    arguments = bound.arguments | bound.arguments.get("kwargs", {})
    context = _checked(arguments.get("context"))
    try:
        for name, reason in LEFT_OUT.items():
            if _is_given(arguments.get(name)):
                raise NotImplementedError(f"{name} must be left out: {reason}")
        _check_positions(arguments.get("position_ids"), context)
    except (ValueError, NotImplementedError) as error:
        context.raise_everywhere(error, FIRST)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    context: ContextParallel | None = None,
    pattern: Pattern | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model calls: query (B, H, N, D), key and value (B, Hk, N, D) -> (B, N, H, D), and no weights.

    N: this rank's tokens. position_ids: (1 or B, N), those of the layout, which is looked at unless the handle has
    check=False. pattern: None for the model's own attention. sliding_window: tokens that a query sees, itself the last.

    Raises ValueError and NotImplementedError on every rank for what is not supported; ValueError on this rank alone
    without a context, by which the ranks find each other.
    """
    context = _checked(context)
    name = f"layer {module.layer_idx}" if hasattr(module, "layer_idx") else None
    try:
        _check_arguments(attention_mask, dropout, others)
        _check_rotary(getattr(module, "config", None))
        _check_positions(position_ids, context)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        pattern = _pattern(pattern, causal, _window(attention_mask, sliding_window, causal))
    except (ValueError, NotImplementedError) as error:
        context.raise_everywhere(error, name)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, N, H, D)
    return context.attention(q, k, v, pattern, scale=scaling, name=name), None


def _checked(context: object) -> ContextParallel:
    if not isinstance(context, ContextParallel):
        raise ValueError(f"context must be given to the model's call, model(..., context=handle), got {context!r}")
    return context


def _check_arguments(attention_mask: object, dropout: float, others: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, _Window):
        given = attention_mask if isinstance(attention_mask, _Given) else type(attention_mask).__name__
        raise NotImplementedError(f"attention_mask must be None, got {given}: who sees whom is said by the pattern")
    if dropout:
        raise NotImplementedError(f"dropout of attention must be 0, got {dropout}: set config.attention_dropout to 0")
    for name, value in others.items():
        if name not in HARMLESS and _is_given(value):
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} must be left out: ring attention does not have it, got {given}")


def _is_given(value: object) -> bool:
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)


def _check_rotary(config: object) -> None:
    """Raise for rotary scaling that a model takes from the greatest position it sees, which differs between ranks."""
    for kind in _kinds_of_rotary(getattr(config, "rope_parameters", None) or {}):
        if "dynamic" in kind or kind == "longrope":
            raise NotImplementedError(
                f"rope_type must not depend on the positions of a rank, as 'dynamic' and 'longrope' do, got {kind!r}; "
                "allowed are 'default', 'linear', 'llama3', 'yarn'"
            )


def _kinds_of_rotary(parameters: dict[str, Any]) -> Iterator[str]:
    """The types in a model's rotary parameters, which may be given for each kind of layer."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from _kinds_of_rotary(value)
        elif name == "rope_type":
            yield str(value)


def _check_positions(position_ids: object, context: ContextParallel) -> None:
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != context.tokens:
        given = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else position_ids
        raise ValueError(f"position_ids must be (1 or batch, {context.tokens}), {RIGHT}, got {given}")
    if context.check and not _seen(position_ids, context):
        if not bool((position_ids == context.positions_on(position_ids.device)).all()):
            raise ValueError(
                f"position_ids must be {RIGHT}, got others: positions that are left to the model count from the "
                "shard's start, and those of packed documents need a handle that knows these (with_documents)"
            )
        _remember(position_ids, context)


# The position_ids that a handle's positions were last found equal to: the layers of a model share them, and a look at
# the values makes the host wait.
_equal: WeakKeyDictionary[ContextParallel, tuple[weakref.ref[Tensor], int]] = WeakKeyDictionary()


def _seen(position_ids: Tensor, context: ContextParallel) -> bool:
    known, version = _equal.get(context, (None, -1))
    return known is not None and known() is position_ids and version == position_ids._version


def _remember(position_ids: Tensor, context: ContextParallel) -> None:
    if not position_ids.is_inference():  # those have no version, so that a change would not be seen
        _equal[context] = weakref.ref(position_ids), position_ids._version


def _window(attention_mask: object, sliding_window: object, causal: bool) -> int | None:
    """How many positions before its own a query of the layer sees; None for all."""
    of_mask = int(attention_mask) if isinstance(attention_mask, _Window) else None
    if sliding_window is None and of_mask is None:
        return None
    tokens = of_mask if sliding_window is None else sliding_window
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or of_mask not in (None, tokens):
        beside = "" if of_mask is None else f" beside a mask of {of_mask}"
        raise ValueError(f"sliding_window must be at least 1 token, as the model's mask has it, got {tokens!r}{beside}")
    if not causal:
        raise NotImplementedError(f"sliding_window must be of causal attention, got {tokens} tokens and causal=False")
    return tokens - 1


def _pattern(pattern: object, causal: bool, window: int | None) -> Pattern:
    if pattern is None:
        return _dense(causal, window)
    if window is not None:
        raise ValueError(f"pattern must be None for a layer with a sliding window of {window + 1} tokens")
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern or None, got {pattern!r}")
    if pattern.causal is not causal:
        raise ValueError(f"pattern must be causal as the model is, causal={causal}, got causal={pattern.causal}")
    return pattern


@lru_cache
def _dense(causal: bool, window: int | None) -> Pattern:
    return Pattern.dense(causal=causal, window=window)


class _Window(int):
    """Stands in the place of a mask: tokens that a query sees, itself the last."""


class _Given(str):
    """Stands in the place of a mask, so that the attention function, which knows the ranks, refuses it on all."""


def _mask(
    *,
    attention_mask: object = None,
    local_size: object = None,
    use_vmap: bool = False,
    mask_function: object = None,
    config: object = None,
    **others: Any,
) -> object:
    """What a model calls to make a mask from that of its caller, which it would drop in silence without this.

    Positions that are not consecutive look like packed sequences to the model, and come as a mask function. They are
    not looked at here, since the attention takes the layout's positions only.
    """
    if attention_mask is not None:
        return _Given("a mask")
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":  # pairs that causal attention does not see
        return _Given("a mask function")
    if local_size is None:
        return None
    chunks = getattr(config, "attention_chunk_size", None)
    if chunks is None and isinstance(local_size, int) and local_size == getattr(config, "sliding_window", None):
        return _Window(local_size)
    return _Given(f"a mask of chunks or windows of {local_size} tokens")
