"""Ring attention in Hugging Face's models, through their registry of attention functions.

    model = prepare(LlamaForCausalLM(config), mesh["context"])                  # then ddp.wrap, fsdp.shard, ...
    context = ContextParallel(Layout.zigzag(tokens.shape[1], ranks), mesh["context"])
    batch = shard_batch(context, tokens, next_tokens(tokens))
    logits = model(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
    cross_entropy(logits, batch.labels, mesh).backward()

Shard a batch that a collator flattened to (1, N), whose position_ids restart in each document, with

    shard_batch(context, tokens, next_tokens(tokens), documents=documents_from_positions(position_ids))

Pass the handle to the model as a keyword, and optionally `pattern` to replace the model's dense attention. Models keep
sliding windows, chunks, sinks, softcaps and head dims of values. Unsupported features are refused by name, on every
rank, before any message: dropout of attention, caches, attention weights as output, and rotary scaling that depends on
the rank. Missing positions are refused too, since the model would count from the start of each shard.

Masks that a model makes of token types, sharded as the tokens are, are those of the whole sequence (`token_types`).
Layers of images are not sharded: embed the whole sequence within `restored(model)`, and shard inputs_embeds instead.
For rows packed as trees write shard_batch(..., pattern=Pattern.tree(...)): positions are then depths.

Positions are those of the handle. Models that count as RoBERTa get them plus padding_idx + 1. Models with rotary
positions of time, height and width get (4, B, N): those of the text first, as Qwen2-VL has them for packed sequences.

An attention mask of ones and zeros, sharded as the tokens are, marks padding (`padding`). All ranks gather it at each
call: leave it out where there is no padding. To generate or evaluate on one rank, write

    with restored(model):
        model.generate(tokens)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ring.extras import optional_imports

with optional_imports(__name__):
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

from reference.pattern import Pattern
from ring.integrations.transformers.call import (
    NAME,
    Checked,
    PreparedCall,
    check_calls,
    is_given,
    prepared_call,
    refuse_generate,
    require_handle,
)
from ring.integrations.transformers.comparison import Comparison
from ring.integrations.transformers.masks import (
    CausalMask,
    CausalWindowMask,
    ChunkMask,
    RefusedMask,
    WindowMask,
    layer_pattern,
    placeholder,
)
from ring.integrations.transformers.positions import checked_positions
from ring.nn.context import ContextParallel
from ring.nn.ring_attention import tokens_first
from ring.precision import accumulator_dtype
from ring.validation import refuse_dtensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ring.comm.transport import Transport

PREPARED = "_has_ring_attention"  # attribute of a prepared model's modules, which copies have, too
# Keywords that every attention function receives, and that do not affect the attention.
HARMLESS = {"num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "cache_position"}


_registered_alone: set[str] = set()  # names of models that are meant to go without `prepare`


def register(name: str = NAME) -> None:
    """Register ring attention for all models, also for those that are not prepared. Idempotent.

    Args:
        name: for `model.set_attn_implementation`.
    """
    _registered_alone.add(name)
    _register(name)


def _register(name: str = NAME) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, placeholder)


def prepare(
    model: PreTrainedModel,
    group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
    *,
    compare: bool = True,
    example: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model, switched to ring attention, with calls that make no cache and validate their arguments.

    Call it on every rank of the context group, with the same weights, before the model is wrapped. The ranks run a tiny
    sequence (`comparison`). A model is refused whose sharded outputs are not those of one process. A group of one rank
    has nothing sharded: it compares ring attention and packed documents alone.

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
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"model must be one of transformers, not yet wrapped, got a {type(model).__name__}")
    if not compare and (group is not None or example is not None):
        raise ValueError("group and example are for the comparison: leave them out with compare=False")
    _register()
    comparison = Comparison(model, group, example) if compare else None
    call, hooks = check_calls(model, _register)
    model.set_attn_implementation(NAME)
    try:
        _check_replaced(model)
        if comparison is not None:
            comparison.check(call)
    except Exception:
        _set_back(call)
        for hook in hooks:
            hook.remove()
        raise
    for module in model.modules():
        setattr(module, PREPARED, True)
    _refuse_to_generate(model)
    return model


def _refuse_to_generate(model: PreTrainedModel) -> None:
    if hasattr(type(model), "generate"):
        model.generate = refuse_generate


def _check_replaced(model: PreTrainedModel) -> None:
    if model.config._attn_implementation != NAME:
        raise NotImplementedError(
            "model must have an attention that transformers' registry can replace, got a "
            f"{type(model).__name__}, which computes its own"
        )


@contextmanager
def restored(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Return a prepared model with its own attention and cache within the block, to generate or evaluate on one rank.

    Args:
        model: from `prepare`; calls in the block have no `context`.

    Raises:
        ValueError: the model is not prepared.
    """
    call = prepared_call(model)
    if call is None:
        raise ValueError(f"model must be a prepared one, from prepare(model), got {type(model).__name__}")
    try:
        _set_back(call)
        vars(model).pop("generate", None)
        yield model
    finally:
        model.set_attn_implementation(NAME)
        _refuse_to_generate(model)


def _set_back(call: PreparedCall) -> None:
    for config, implementation in call.before:
        config._attn_implementation = implementation


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    checked: Checked | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a model's layer, (B, N, H, Dv), and None in place of weights.

    Args:
        module: the layer's attention; its layer_idx names the call in errors.
        query: (B, H, N, D) with this rank's N tokens.
        key: (B, Hk, N, D).
        value: (B, Hk, N, Dv).
        attention_mask: None, or a placeholder from this module's mask function.
        scaling: factor of the scores; None: D ** -0.5.
        dropout: must be 0.
        is_causal: None: the module's attribute, True without one.
        sliding_window: tokens that a query sees, with itself, to one side; None: those of the mask.
        position_ids: (1 or B, N), those of the layout, which are compared unless the handle has check=False, or the
            model's call was checked.
        context: handle of the sharded sequence.
        pattern: None for the model's own attention.
        softcap: bound of the scores, as in Gemma 2; None: no bound.
        s_aux: (H,), a sink for each query head, as in gpt-oss; None: none.
        checked: from the call of a prepared model; None without `prepare`.
        others: refused if set, unless they do not affect the attention.

    Raises:
        ValueError, NotImplementedError: unsupported arguments, on every rank; on this rank alone without a context.
    """
    context = require_handle(context)
    name = _name(module)
    try:
        _check_arguments(type(module).__name__, attention_mask, dropout, others)
        _check_rotary(getattr(module, "config", None))
        _check_prepared(module, checked)
        if checked is None:
            checked_positions(position_ids, context, name=name)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal or isinstance(attention_mask, CausalMask | CausalWindowMask)
        typed = None if checked is None else checked.typed
        pattern = layer_pattern(module, attention_mask, sliding_window, causal, pattern, typed)
        _check_padding(checked, causal and not pattern.has_slices and context.pattern is None)
        sinks = _sinks(s_aux, query)
    except Exception as error:  # of any type: the other ranks must raise it too
        context.raise_everywhere(error, name)
    empty = checked is not None and checked.stand_in
    q, k, v = (tokens_first(x)[:, : 0 if empty else None] for x in (query, key, value))  # (B, N, H, D)
    out = context.attention(q, k, v, pattern, scale=scaling, softcap=softcap, sinks=sinks, name=name)
    return torch.cat((out, out.new_zeros((out.shape[0], 1, *out.shape[2:]))), 1) if empty else out, None


def _name(module: nn.Module) -> str | None:
    """Label of a layer's call: None in a graph, which would be compiled anew for each layer."""
    named = hasattr(module, "layer_idx") and not torch.compiler.is_compiling()
    return f"layer {module.layer_idx}" if named else None


def _check_arguments(kind: str, attention_mask: object, dropout: float, others: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, CausalMask | WindowMask | ChunkMask):
        got = attention_mask if isinstance(attention_mask, RefusedMask) else type(attention_mask).__name__
        raise NotImplementedError(f"attention_mask must be None, got {got} from {kind}: the pattern is the mask")
    if dropout:
        raise NotImplementedError(
            f"dropout of attention must be 0, got {dropout}: set config.attention_dropout, or "
            "attention_probs_dropout_prob, to 0"
        )
    for name, value in others.items():
        if name not in HARMLESS and is_given(value):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name} must be left out: ring attention does not support it, got {got} from {kind}"
            )


def _sinks(s_aux: object, query: Tensor) -> Tensor | None:
    """Return the sinks in the accumulator's dtype, since models keep them in one of their own."""
    if s_aux is None:
        return None
    refuse_dtensor("s_aux", s_aux)
    heads = query.shape[1]
    if not isinstance(s_aux, Tensor) or s_aux.shape != (heads,) or not s_aux.is_floating_point():
        got = f"{s_aux.dtype} of shape {tuple(s_aux.shape)}" if isinstance(s_aux, Tensor) else repr(s_aux)
        raise ValueError(f"s_aux must be None or ({heads},) floating numbers, a sink for each query head, got {got}")
    if s_aux.device != query.device:
        raise ValueError(f"s_aux must be on the query's device {query.device}, got {s_aux.device}")
    return s_aux.to(accumulator_dtype(query.dtype))


def _check_padding(checked: Checked | None, causal: bool) -> None:
    if checked is not None and checked.causal_only and not causal:
        raise NotImplementedError(
            "attention_mask must have its zeros in the same places of every row, without a pattern, where attention is "
            "not causal or has slices, got others: call the model for each row"
        )


def _check_prepared(module: nn.Module, checked: Checked | None) -> None:
    """Raise for a model that got its attention with the configuration of a prepared one."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if checked is None and name == NAME and name not in _registered_alone and not getattr(module, PREPARED, False):
        raise ValueError(
            f"model must be prepared, got a {type(module).__name__} of another, which has the configuration of a "
            "prepared one: call prepare with this model, too, or register() to go without what prepare checks"
        )


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
