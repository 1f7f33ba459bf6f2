"""Temperature of Llama 4's attention without rotations (arXiv 2501.19399), by position in the whole sequence.

Such a layer scales queries by a function of 0, 1, ..., plus the number of tokens in its cache. Within a shard that is
another position than in one process. A stand-in for the cache, which holds nothing, corrects it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class _Before:
    """Stand-in for a layer's cache. tokens: (N,), before each token of the shard, less those in the shard."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def get_seq_length(self, layer: int) -> Tensor:
        return self._tokens

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return key, value


def scale_by_position(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let layers with a temperature count positions in the whole sequence, in calls that have the keyword `checked`.

    Return the handles of the hooks.
    """
    layers = [x for x in model.modules() if getattr(x, "attn_temperature_tuning", False) and not x.use_rope]
    return [layer.register_forward_pre_hook(_count, with_kwargs=True) for layer in layers]


def _count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get("checked") is None:  # the model's own attention
        return args, kwargs
    positions = kwargs["checked"].positions[0]
    before = positions - torch.arange(len(positions), device=positions.device)
    return args, kwargs | {"past_key_values": _Before(before)}
