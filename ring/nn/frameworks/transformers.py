"""Ring attention in Hugging Face's models, through their registry of attention functions.

    model = prepare(LlamaForCausalLM(config), mesh["context"])                  # then ddp.wrap, fsdp.shard, ...
    context = ContextParallel(Layout.zigzag(tokens.shape[1], ranks), mesh["context"])
    batch = shard_batch(context, tokens, next_tokens(tokens))
    logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
    cross_entropy(logits, batch.labels, mesh).backward()

Shard a batch that a collator flattened to (1, N), whose position_ids restart in each document, with

    shard_batch(context, tokens, next_tokens(tokens), documents=documents_from_positions(position_ids))

Pass the handle to the model as a keyword, and optionally `pattern` to replace the model's dense attention. Layers with
a sliding window keep it. Unsupported features are refused by name, on every rank, before any message: attention masks,
dropout of attention, attention in chunks, sinks, softcaps, caches, attention weights as output, and rotary scaling that
depends on the rank. Missing positions are refused too, since the model would count from the start of each shard. Only
text models are supported: masks for images are refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from reference.pattern import Pattern
from ring.nn.context import ContextParallel
from ring.nn.frameworks.comparison import Comparison
from ring.nn.frameworks.module_calls import configs_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from ring.comm.transport import Transport

NAME = "ring"
FIRST = "layer 0"  # the attention call that an error of the model's call replaces
# Keywords that every attention function receives, and that do not affect the attention.
HARMLESS = {"num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "cache_position"}
RIGHT = "context.positions, as in a batch of shard_batch"


def register(name: str = NAME) -> None:
    """Register ring attention for all models. Idempotent.

    Args:
        name: for `model.set_attn_implementation`.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)


def prepare(
    model: PreTrainedModel,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
    *,
    compare: bool = True,
    example: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model, switched to ring attention, without a cache and with validation of each call's arguments.

    Call it on every rank of the context group, with the same weights, before the model is wrapped. The ranks run a tiny
    sequence (`ring.nn.frameworks.comparison`). A model is refused whose sharded outputs are not those of one process. A
    group of one rank has nothing sharded: it compares ring attention and packed documents alone.

    Args:
        model: changed in place, unless it is refused.
        group: that of the context, as mesh["context"]; None: the default group.
        compare: False for a model that cannot be compared: nothing then notices what it computes of other tokens.
        example: whole inputs of the comparison by name, the same on every rank, as {"input_ids": (B, n)}. Tensors with
            n tokens along dimension 1 are sharded. None: one row of 6 tokens a rank and 11 more.

    Raises:
        ValueError, NotImplementedError: the model differs, at the module that is named, or cannot be compared. Every
            rank raises the same error.
    """
    if not compare and (group is not None or example is not None):
        raise ValueError("group and example are for the comparison: leave them out with compare=False")
    register()
    comparison = Comparison(model, group, example) if compare else None
    hooks = [model.register_forward_pre_hook(_check_call, with_kwargs=True), *_carry_positions(model)]
    implementations = [(config, config._attn_implementation) for config in configs_of(model)]
    model.set_attn_implementation(NAME)
    if comparison is not None:
        try:
            comparison.check()
        except Exception:
            for hook in hooks:
                hook.remove()
            for config, implementation in implementations:
                config._attn_implementation_internal = implementation
            raise
    model.config.use_cache = False
    return model


def _carry_positions(model: nn.Module) -> list[RemovableHandle]:
    """Let embeddings whose first position is the one after their padding token take positions from 0."""

    def shift(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get("position_ids") is None:
            return args, kwargs
        return args, kwargs | {"position_ids": kwargs["position_ids"] + module.padding_idx + 1}

    modules = [x for x in model.modules() if hasattr(x, "create_position_ids_from_input_ids")]
    return [module.register_forward_pre_hook(shift, with_kwargs=True) for module in modules]


# Arguments of a model's call that its attention does not receive, each with the reason why it must be left out.
LEFT_OUT = {
    "labels": "the model shifts them within each shard and takes the mean of each: give the logits to cross_entropy",
    "past_key_values": "a cache holds the keys of one shard",
    "output_attentions": "ring attention does not compute weights",
    "logits_to_keep": "it would keep the last tokens of each shard",
    "output_router_logits": "the model takes its auxiliary loss over the tokens of a rank: call the model within it, "
    "which returns router logits without that loss, and sum those over all ranks",
}


def _check_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    arguments = bound.arguments | bound.arguments.get("kwargs", {})
    context = _checked_context(arguments.get("context"))
    try:
        for name, reason in LEFT_OUT.items():
            if _is_given(arguments.get(name, getattr(model.config, name, None))):
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
    """Return the attention of a model's layer, (B, N, H, D), and None in place of weights.

    Args:
        module: the layer's attention; its layer_idx names the call in errors.
        query: (B, H, N, D) with this rank's N tokens.
        key, value: (B, Hk, N, D).
        attention_mask: None, or a placeholder from this module's mask function.
        scaling: factor of the scores; None: D ** -0.5.
        dropout: must be 0.
        is_causal: None: the module's attribute, True without one.
        sliding_window: tokens that a query sees, with itself; None: all.
        position_ids: (1 or B, N), those of the layout, which are compared unless the handle has check=False.
        context: handle of the sharded sequence.
        pattern: None for the model's own attention.
        others: refused if set, unless they do not affect the attention.

    Raises:
        ValueError, NotImplementedError: unsupported arguments, on every rank; on this rank alone without a context.
    """
    context = _checked_context(context)
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


def _checked_context(context: object) -> ContextParallel:
    if not isinstance(context, ContextParallel):
        raise ValueError(f"context must be given to the model's call, model(..., context=handle), got {context!r}")
    return context


def _check_arguments(attention_mask: object, dropout: float, others: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, _WindowMask):
        got = attention_mask if isinstance(attention_mask, _RefusedMask) else type(attention_mask).__name__
        raise NotImplementedError(f"attention_mask must be None, got {got}: the pattern is the mask")
    if dropout:
        raise NotImplementedError(f"dropout of attention must be 0, got {dropout}: set config.attention_dropout to 0")
    for name, value in others.items():
        if name not in HARMLESS and _is_given(value):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} must be left out: ring attention does not support it, got {got}")


def _is_given(value: object) -> bool:
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)


def _check_rotary(config: object) -> None:
    """Raise for rotary scaling by the greatest position in a shard, which differs between ranks."""
    for kind in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if "dynamic" in kind or kind == "longrope":
            raise NotImplementedError(
                f"rope_type must not depend on the positions of a rank, as 'dynamic' and 'longrope' do, got {kind!r}; "
                "allowed are 'default', 'linear', 'llama3', 'yarn'"
            )


def _rope_types(parameters: dict[str, Any]) -> Iterator[str]:
    """Yield the types in a model's rotary parameters, which may be nested by kind of layer."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif name == "rope_type":
            yield str(value)


def _check_positions(position_ids: object, context: ContextParallel) -> None:
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != context.tokens:
        got = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else position_ids
        raise ValueError(f"position_ids must be (1 or batch, {context.tokens}), {RIGHT}, got {got}")
    if context.check and not _is_verified(position_ids, context):
        if not bool((position_ids == context.positions_on(position_ids.device)).all()):
            raise ValueError(
                f"position_ids must be {RIGHT}, got others: without position_ids the model counts from the "
                "shard's start, and packed documents need a handle with their lengths (with_documents)"
            )
        _set_verified(position_ids, context)


# The position_ids that last passed the check of a handle. Layers of a model share them, and comparing values makes the
# host wait for the GPU.
_verified: WeakKeyDictionary[ContextParallel, tuple[weakref.ref[Tensor], int]] = WeakKeyDictionary()


def _is_verified(position_ids: Tensor, context: ContextParallel) -> bool:
    known, version = _verified.get(context, (None, -1))
    return known is not None and known() is position_ids and version == position_ids._version


def _set_verified(position_ids: Tensor, context: ContextParallel) -> None:
    if not position_ids.is_inference():  # inference tensors have no version, so a change would go unnoticed
        _verified[context] = weakref.ref(position_ids), position_ids._version


def _window(attention_mask: object, sliding_window: object, causal: bool) -> int | None:
    """Number of positions before its own that a query of the layer sees; None for all."""
    mask_tokens = int(attention_mask) if isinstance(attention_mask, _WindowMask) else None
    if sliding_window is None and mask_tokens is None:
        return None
    tokens = mask_tokens if sliding_window is None else sliding_window
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or mask_tokens not in (None, tokens):
        also = "" if mask_tokens is None else f" beside a mask of {mask_tokens}"
        raise ValueError(f"sliding_window must be at least 1 token, as the model's mask has it, got {tokens!r}{also}")
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


class _WindowMask(int):
    """Placeholder for a mask: number of tokens that a query sees, including itself."""


class _RefusedMask(str):
    """Placeholder for an unsupported mask. The attention function, which has the context, refuses it on all ranks."""


def _mask(
    *,
    attention_mask: object = None,
    local_size: object = None,
    use_vmap: bool = False,
    mask_function: object = None,
    config: object = None,
    **others: Any,
) -> object:
    """Mask function of a model: returns a placeholder for the caller's mask, which the model would otherwise drop.

    The model takes positions that are not consecutive for packed sequences, and passes a mask function. Ignore it,
    since the attention uses only the layout's positions.
    """
    if attention_mask is not None:
        return _RefusedMask("a mask")
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":  # of pairs that causal attention does not see
        return _RefusedMask("a mask function")
    if local_size is None:
        return None
    chunks = getattr(config, "attention_chunk_size", None)
    if chunks is None and isinstance(local_size, int) and local_size == getattr(config, "sliding_window", None):
        return _WindowMask(local_size)
    return _RefusedMask(f"a mask of chunks or windows of {local_size} tokens")
