"""Checks each call of a prepared model of Hugging Face, and hands its layers what the checks found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ring.integrations.transformers.padding import check_mask, whole, without_padding
from ring.integrations.transformers.positions import checked_positions, counted, has_axes, padding_token
from ring.integrations.transformers.temperature import scale_by_position
from ring.integrations.transformers.token_types import Masks, masks_of_types, types_argument
from ring.nn.context import ContextParallel, checked_context

NAME = "ring"
FIRST = "layer 0"  # the attention call that an error of the model's call replaces

# Arguments of a model's call that its attention does not receive, each with the reason why it must be left out.
LEFT_OUT = {
    "positional arguments": "forward names fewer arguments: give them by name, as model(input_ids=tokens)",
    "labels": "the model shifts them within each shard and takes the mean of each: give the logits to cross_entropy",
    "use_cache": "a cache holds the keys of one shard",
    "past_key_values": "a cache holds the keys of one shard",
    "output_attentions": "ring attention does not compute weights",
    "softcap": "layers that have one give their own",
    "s_aux": "layers that have sinks give their own",
    "logits_to_keep": "it would keep the last tokens of each shard",
    "output_router_logits": "the model takes its auxiliary loss over the tokens of a rank: call the model within it, "
    "which returns router logits without that loss, and take their means over all tokens by token_mean",
}
UNCOMPARED = (
    "attention_mask must have its zeros behind the tokens for a model that prepare did not compare, which may count "
    "positions from its mask: leave compare=False out, or pad on the right"
)
IMAGES = (
    "layers of images are not sharded: compute inputs_embeds of the whole sequence within restored(model), and give "
    "this rank's shard of them"
)
COUNTING = (
    "pattern of a tree must be left out for a model that counts positions itself, from padding tokens or its mask: "
    "positions in a tree are depths, in noisy frames those of clean ones"
)
require_handle = partial(
    checked_context,
    required="given to the model's call, model(..., context=handle)",
    instead=". Call it with whole sequences, or generate, within restored(model). In a trainer call the model of "
    "compute_loss, and write class MyTrainer(ContextParallelTrainer, DPOTrainer), in this order",
)
CONFIGURED = ("output_attentions", "output_router_logits")  # a call takes these from the configuration


class Checked(NamedTuple):
    """The keyword `checked` of a layer: its model's call has the right positions, if the model hands them on or not.

    causal_only: True if padding is on the right, which only causal attention does not see. stand_in: True for a rank
    without tokens. Models cannot reshape an empty tensor, so this rank's model gets one token, which no attention sees.
    positions: of the layout, in the shape of the model's position_ids. outer: False for a model within the one called.
    typed: masks of token types, None without them.
    """

    causal_only: bool
    stand_in: bool
    positions: Tensor
    outer: bool
    typed: Masks | None = None


@dataclass(eq=False)
class PreparedCall:
    """The hook of a prepared model and of the models in it, which may be called too. It has no other state of its own:
    copies of a model, and pickled ones, are models of their own.

    register: registers the attention. before: its configurations' attention. counts_mask: without position_ids, the
    model counts the ones of its mask. refused: why it cannot have padding; None if it can. types_refused: why it cannot
    have token types. The comparison sets these.
    """

    register: Callable[[], None]
    before: list[tuple[PreTrainedConfig, str]]
    axes: bool
    padding: int | None
    counts_mask: bool = False
    refused: str | None = None
    types_refused: str | None = None
    compared: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.register()  # a process that loads a model may have prepared none

    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        checked = kwargs.get("checked")
        if isinstance(checked, Checked):  # from the model around this one
            inner = checked._replace(outer=False)
            return args, kwargs | {"checked": inner}
        parameters = inspect.signature(model.forward).parameters
        names = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        named = dict(zip(names, args, strict=False))
        arguments = named | kwargs
        if model.config._attn_implementation != NAME:
            _refuse_handle(arguments.get("context"), model.config._attn_implementation)
            return None
        if arguments.get("context") is None:
            return None  # its attention refuses that, if it has any: models around it need not hand theirs on
        if named.keys() & kwargs.keys():
            return None  # Python refuses the call
        if len(args) > len(names):
            arguments["positional arguments"] = args
        configured = {name: getattr(model.config, name, None) for name in CONFIGURED}
        changes = self._changes(model, configured | arguments)
        if not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            changes = {name: value for name, value in changes.items() if name in parameters}
        return (), arguments | changes

    def _changes(self, model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the model gets in place of the caller's."""
        context, mask = require_handle(arguments.get("context")), arguments.get("attention_mask")
        try:
            for name, reason in LEFT_OUT.items():
                if is_given(arguments.get(name)):
                    raise NotImplementedError(f"{name} must be left out: {reason}")
            if is_given(arguments.get("pixel_values")) and model.main_input_name == "input_ids":
                raise NotImplementedError(f"pixel_values must be left out: {IMAGES}")
            if mask is not None:
                check_mask(mask, context)
        except Exception as error:  # of any type: the other ranks must raise it too
            context.raise_everywhere(error, FIRST)
        real = None if mask is None else whole(context, mask != 0)  # (B, n)
        count = None if real is None else counted(real, context)
        try:
            if real is not None and self.refused and not bool(real.all()):
                raise NotImplementedError(f"attention_mask must be None or ones for this model: {self.refused}")
            positions = checked_positions(arguments.get("position_ids"), context, self.axes, FIRST, count)
        except Exception as error:
            context.raise_everywhere(error, FIRST)
        typed = self._typed(model, arguments, context)
        counts = self.padding is not None or (self.counts_mask and count is not None)
        if counts and context.pattern is not None and (context.pattern.depths or context.pattern.copies):
            context.raise_everywhere(NotImplementedError(COUNTING), FIRST)
        own = self._own_positions(arguments.get("input_ids"), positions, count, context)
        causal_only = False
        if real is not None and count is not None:
            positions = context.positions_on(positions.device)[None]
            context, causal_only = without_padding(real, context, arguments.get("pattern") is None)
            if not self.compared and bool(((count != positions + 1) & (count > 0)).any()):
                context.raise_everywhere(NotImplementedError(UNCOMPARED), FIRST)
        empty = own.shape[-1] == 0
        changes = {name: _with_token(x) for name, x in arguments.items()} if empty else {}
        own, positions = (x.new_zeros((*x.shape[:-1], 1)) if empty else x for x in (own, positions))
        if typed is not None:
            changes |= {str(types_argument(model)): None}
        return changes | {
            "context": context, "use_cache": False, "checked": Checked(causal_only, empty, positions, True, typed),
            "attention_mask": None, "position_ids": own,
        }  # fmt: skip

    def _typed(self, model: PreTrainedModel, arguments: dict[str, Any], context: ContextParallel) -> Masks | None:
        """Return masks of the token types, if the model makes masks of them. All ranks gather them."""
        name = types_argument(model)
        types = None if name is None else arguments.get(name)
        if types is None:
            return None
        try:
            if torch.compiler.is_compiling():
                raise NotImplementedError(
                    f"{name} must be None in a compiled model, got some: compile its layers instead"
                )
            if not isinstance(types, Tensor) or types.dim() != 2 or types.shape[1] != context.tokens:
                got = f"shape {tuple(types.shape)}" if isinstance(types, Tensor) else type(types).__name__
                raise ValueError(f"{name} must be this rank's shard, (batch, {context.tokens}), got {got}")
        except Exception as error:  # of any type: the other ranks must raise it too
            context.raise_everywhere(error, FIRST)
        all_types = whole(context, types)
        try:
            if self.types_refused is not None:
                raise NotImplementedError(f"{name} must be left out for this model: {self.types_refused}")
            return masks_of_types(model, all_types)
        except Exception as error:
            context.raise_everywhere(error, FIRST)

    def _own_positions(
        self, ids: Tensor | None, positions: Tensor, count: Tensor | None, context: ContextParallel
    ) -> Tensor:
        """Return the positions that the model would count itself in one process, if it counts; else those given.

        count: (B, N), of the mask's ones up to each token.
        """
        if self.padding is None:
            return (count - 1).clamp(min=0) if self.counts_mask and count is not None else positions
        if ids is None:
            return positions + self.padding + 1
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "model must be compiled layer by layer, since it counts positions from padding tokens, which the ranks "
                "gather: compile its layers instead"
            )
        return counted(whole(context, ids != self.padding), context) + self.padding


def prepared_call(model: PreTrainedModel) -> PreparedCall | None:
    """Return the hook of a prepared model, None for another."""
    hooks = model._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, PreparedCall)), None)


def check_calls(model: PreTrainedModel, register: Callable[[], None]) -> tuple[PreparedCall, list[RemovableHandle]]:
    """Add hooks to a model whose attention is not replaced yet; a prepared one keeps its own. Return the hook of calls,
    and handles of those that are added."""
    before = prepared_call(model)
    if before is not None:
        return before, []
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    trees = [_tree(module.config) for module in models]
    configs = {id(config): config for tree in trees for config in tree}.values()
    before_all = [(config, config._attn_implementation) for config in configs]
    call = PreparedCall(register, before_all, has_axes(model.config), padding_token(model))
    return call, [
        *(x.register_forward_pre_hook(call, with_kwargs=True) for x in models),
        *(x.register_forward_hook(_without_token, with_kwargs=True) for x in models),
        *scale_by_position(model),
    ]


def _tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and then those in it: setting the attention of one sets theirs."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _tree(getattr(config, name))


def refuse_generate(*_: Any, **__: Any) -> NoReturn:
    """Raise in place of a prepared model's generate."""
    raise ValueError(
        "generate must be called within restored(model), with whole sequences and without context: its cache would "
        "hold the keys of one shard"
    )


def is_given(value: object) -> bool:
    """True for an argument that would have an effect."""
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)


def _refuse_handle(context: object, implementation: str | None) -> None:
    if isinstance(context, ContextParallel):
        error = ValueError(
            f"context must be left out while the model's attention is {implementation!r}, not {NAME!r}, as within "
            "restored(model), and in copies that are made there: each rank would compute its shard alone. Call and "
            "copy the model outside of that block"
        )
        context.raise_everywhere(error, FIRST)


def _with_token(x: Any) -> Any:
    """Add a token of zeros to a tensor (B, 0, ...)."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1]:
        return x
    return torch.cat((x, x.new_zeros((x.shape[0], 1, *x.shape[2:]))), 1)


def _without_token(_: PreTrainedModel, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Remove the token of a rank without tokens from the outputs, (B, 1, D); its gradients are zero."""
    checked = kwargs.get("checked")
    if checked is None or not checked.stand_in or not checked.outer:
        return None
    return tree_map(lambda x: x[:, :0] if isinstance(x, Tensor) and x.dim() == 3 else x, output)
