"""Masks that models of Hugging Face make of token types: images that see both ways, and prefixes.

Such a model's class makes them in `create_masks_for_generate(..., token_type_ids=...)`. All ranks gather the types, and
the model makes its masks of the whole sequence. Each is a function of transformers: a sum or a product of few others,
which become slices. So what a version computes is what the ring does, for each kind of layer:

    Gemma 3, global layers    causal or same image
    Gemma 3, local layers     (causal or same image) and not further back than the window
    Gemma 4                   global layers causal alone, local ones as in Gemma 3
    PaliGemma                 causal, in local layers of PaliGemma 2 within the window, or both in the prefix
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from reference.mask_converters import spans_from_token_types
from reference.pattern import Branch, Pattern
from reference.slices import CAUSAL, EVERYTHING, Slice, meet, without

TYPES = ("token_type_ids", "mm_token_type_ids")
ANY_LAYER = "every layer"
Masks = Mapping[str, Pattern]  # by kind of layer, or of ANY_LAYER

_whole = ContextVar("whole", default=False)  # True while a model makes masks of a whole sequence


def types_argument(model: PreTrainedModel) -> str | None:
    """Return the name of the model's argument that it makes masks of, None without one."""
    makes = _maker(model)
    names = inspect.signature(type(model).forward).parameters
    return next(
        (x for x in TYPES if makes is not None and x in inspect.signature(makes).parameters and x in names), None
    )


def _maker(model: PreTrainedModel) -> Callable[..., Any] | None:
    """The method that makes masks of token types: of the model's class, or of another head of its family."""
    family = [x for x in vars(sys.modules[type(model).__module__]).values() if isinstance(x, type)]
    makers = (getattr(x, "create_masks_for_generate", None) for x in (type(model), *family))
    return next((x for x in makers if x is not None and set(TYPES) & set(inspect.signature(x).parameters)), None)


def masks_of_types(model: PreTrainedModel, types: Tensor) -> Masks:
    """Return the mask of each kind of layer.

    Args:
        model: with a `types_argument`, switched to ring attention.
        types: (B, n) of the whole sequence.

    Raises:
        NotImplementedError: rows have different types, or a mask is of functions that do not become slices.
    """
    if bool((types != types[:1]).any()):
        raise NotImplementedError(
            "token types must be the same in all rows, since rows share a mask, got others: write one long row with "
            "documents=lengths, or call the model for each row"
        )
    name, makes = types_argument(model), _maker(model)
    assert name is not None and makes is not None
    token = _whole.set(True)
    try:
        made = makes(
            config=model.config, inputs_embeds=types.new_empty((1, types.shape[1], 1), dtype=torch.float32),
            attention_mask=None, past_key_values=None, position_ids=None, is_first_iteration=True,
            **{name: types[:1]},
        )  # fmt: skip
    finally:
        _whole.reset(token)
    masks = made if isinstance(made, dict) else {ANY_LAYER: made}
    for kind, mask in masks.items():
        if not isinstance(mask, Pattern):
            raise NotImplementedError(
                f"{name} must be left out of this model's call, got some, of which it makes a mask for {kind} that is "
                "not of causality, windows and blocks alone"
            )
    return masks


def whole_mask(mask_function: object) -> Pattern | None:
    """Return the mask of a function of transformers while a model makes masks of a whole sequence; otherwise None, and
    for functions that do not become slices.
    """
    # A graph cannot read the variable, and is not traced there.
    slices = None if torch.compiler.is_compiling() or not _whole.get() else _slices(mask_function)
    if slices is None:
        return None
    if len(slices) == 1 and slices[0]._replace(low=None) == CAUSAL:  # no type in this batch makes a difference
        return Pattern.dense(causal=True, window=None if slices[0].low is None else -slices[0].low)
    return Pattern((Branch(slices=tuple(slices)),))


def has_causal(function: Any) -> bool:
    """Return True if a mask function is causal, or made of one that is."""
    inner = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    parts = [*inner.get("mask_functions", ()), inner.get("mask_function")]
    return function is masking_utils.causal_mask_function or any(has_causal(x) for x in parts if x is not None)


def _slices(function: Any) -> list[Slice] | None:
    """Disjoint slices of a mask function (batch, head, query, key); None for others than those here."""
    kind = getattr(function, "__qualname__", "").removesuffix(".<locals>.inner_mask")
    inner = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    basic: dict[str, Callable[[], list[Slice]]] = {
        "causal_mask_function": lambda: [CAUSAL],
        "bidirectional_mask_function": lambda: [EVERYTHING],
        "sliding_window_overlay": lambda: [Slice(low=1 - inner["sliding_window"])],
        "blockwise_overlay": lambda: _blocks(inner["block_sequence_ids"]),
    }
    joined = {"and_masks.<locals>.and_mask": _both, "or_masks.<locals>.or_mask": _either}
    if kind in basic and getattr(function, "__module__", "") == masking_utils.__name__:
        return basic[kind]()
    parts = [_slices(one) for one in inner.get("mask_functions", ())]
    some = [one for one in parts if one is not None]
    return reduce(joined[kind], some) if kind in joined and len(some) == len(parts) else None


def _both(a: list[Slice], b: list[Slice]) -> list[Slice]:
    return [both for pair in product(a, b) if (both := meet(*pair)) is not None]


def _either(a: list[Slice], b: list[Slice]) -> list[Slice]:
    return a + [rest for one in b for rest in without(one, a)]


def _blocks(ids: Tensor) -> list[Slice]:
    """Slices in which tokens of equal ids >= 0 see each other: (1, n)."""
    slices = []
    for block in ids.unique().tolist():
        spans = spans_from_token_types(ids, (block,)) if block >= 0 else []
        slices += [Slice(*queries, *keys) for queries, keys in product(spans, repeat=2)]
    return slices
