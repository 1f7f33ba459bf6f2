"""Checks position_ids of Hugging Face's models against a handle, eagerly and in compiled graphs.

The attention takes positions from the handle, the model's embeddings and rotations from position_ids. Both must agree.
"""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from transformers import PreTrainedModel

from reference.documents import begins
from reference.pattern import numbered_pattern
from ring.comm.process_group import ProcessGroupTransport
from ring.layout import numbered_layout
from ring.nn.context import ContextParallel
from ring.torch_compile import group_name, named_transport

RIGHT = "context.positions, as in a batch of shard_batch"
AXES = 4  # of the text, then time, height and width


def padding_token(model: PreTrainedModel) -> int | None:
    """Return padding_idx of embeddings that count as RoBERTa's: after it, without its tokens. None without them."""
    found = {x.padding_idx for x in model.modules() if hasattr(x, "create_position_ids_from_input_ids")}
    return found.pop() if len(found) == 1 else None


def counted(real: Tensor, context: ContextParallel) -> Tensor:
    """Return the number of real tokens of the document up to each token of this rank, (B, N); 0 for the others.

    real: (B, n) bool, whole.
    """
    count = real.long().cumsum(1)
    if context.documents is not None:
        first = begins(context.documents, torch.arange(real.shape[1])).to(real.device)
        count = count - torch.nn.functional.pad(count, (1, 0))[:, first]
    return context.shard(count * real)


def has_axes(config: Any) -> bool:
    """True for rotary positions of time, height and width (as in Qwen2-VL), which position_ids of the text precede."""
    return "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})


def checked_positions(
    position_ids: object,
    context: ContextParallel,
    axes: bool = False,
    name: str | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Return position_ids, (1 or B, N) or, with `axes`, (4, B, N); raise unless they are the layout's.

    name: of the call of attention that an error replaces in a graph, where values are compared when it runs. count: of
    `counted`, of a mask. Positions may also be counted from it, with any at padding: the attention does not use them.
    """
    _check_shape(position_ids, context, axes)
    assert isinstance(position_ids, Tensor)
    if not context.check:
        return position_ids
    if torch.compiler.is_compiling():
        packed, transport = context._packed, context.transport
        group = transport.group if isinstance(transport, ProcessGroupTransport) else transport
        compared: Tensor = torch.ops.ring.compared_positions(
            position_ids, layout=context.layout.number, packed=0 if packed is None else packed.number,
            group=group_name(group), name=name,
        )  # fmt: skip
        return compared
    if not _is_verified(position_ids, context):
        if not _is_counted(position_ids, count):
            _compare(position_ids, context)
            _set_verified(position_ids, context)
    return position_ids


def _check_shape(position_ids: object, context: ContextParallel, axes: bool) -> None:
    if not isinstance(position_ids, Tensor):
        raise ValueError(
            f"{_allowed(context)}, got {position_ids!r}. If the model's call has them, the model does not hand them on "
            "to its attention: use prepare(model), which checks them at the call"
        )
    shape = tuple(position_ids.shape)
    # Under torch.compile a comparison would specialize the graph to this length; the operator compares as well.
    local = position_ids.dim() > 0 and (torch.compiler.is_compiling() or shape[-1] == context.tokens)
    if local and (position_ids.dim() == 2 or (axes and position_ids.dim() == 3 and shape[0] == AXES)):
        return
    if axes and position_ids.dim() == 3:
        raise ValueError(
            f"position_ids of time, height and width must follow those of the text, ({AXES}, batch, {context.tokens}): "
            "torch.cat((batch.positions.expand(1, *batch.tokens.shape), context.shard(position_ids, 2))), with "
            f"position_ids of the whole sequence, got {shape}"
        )
    raise ValueError(f"{_allowed(context)}, got {shape}")


def _allowed(context: ContextParallel) -> str:
    return f"position_ids must be (1 or batch, {context.tokens}), {RIGHT}"


def _is_counted(position_ids: Tensor, count: Tensor | None) -> bool:
    text = position_ids[0] if position_ids.dim() == 3 else position_ids
    return count is not None and bool(((text == count - 1) | (count == 0)).all())


def _compare(position_ids: Tensor, context: ContextParallel) -> None:
    text = position_ids[0] if position_ids.dim() == 3 else position_ids
    expected = context.positions_on(text.device)
    if text.shape[-1] == len(expected) and bool((text == expected).all()):
        return
    raise ValueError(
        f"position_ids must be {RIGHT}, got others: without position_ids the model counts from the shard's "
        "start; positions that are counted from a mask, cumsum(1) - 1, need that attention_mask; and packed documents "
        "need the handle with their lengths, context=batch.context (shard_batch(..., documents=lengths)). Rows of "
        "different documents must be one row, tokens.view(1, -1), with the lengths of all documents"
    )


# The position_ids that last passed the check of a handle. Layers of a model share them, and comparing values makes the
# host wait for the GPU.
_verified: WeakKeyDictionary[ContextParallel, tuple[weakref.ref[Tensor], int]] = WeakKeyDictionary()


def _is_verified(position_ids: Tensor, context: ContextParallel) -> bool:
    known, version = _verified.get(context, (None, -1))
    return known is not None and known() is position_ids and version == position_ids._version


def _set_verified(position_ids: Tensor, context: ContextParallel) -> None:
    if not position_ids.is_inference():  # inference tensors have no version, so a change would go unnoticed
        _verified[context] = weakref.ref(position_ids), position_ids._version


@torch.library.custom_op("ring::compared_positions", mutates_args=())
def compared_positions(position_ids: Tensor, *, layout: int, packed: int, group: str, name: str | None) -> Tensor:
    """Return a copy of position_ids when a graph runs, or raise on every rank. Numbers as in `ring.torch_compile`.

    The model uses the copy, so that no graph compares later than the first attention.
    """
    context = ContextParallel(numbered_layout(layout), named_transport(group))._over(
        numbered_pattern(packed) if packed else None
    )
    try:
        _compare(position_ids, context)
    except ValueError as error:
        context.raise_everywhere(error, name)
    return position_ids.clone()


@compared_positions.register_fake
def _(position_ids: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(position_ids)


has_side_effect(torch.ops.ring.compared_positions.default)  # a model without positions would drop it
