"""Placeholders for the masks that Hugging Face's models make, through their registry of mask functions."""

from __future__ import annotations

import torch
from torch import Tensor


class WindowMask(int):
    """Placeholder for a mask of a window: tokens that a query sees, including itself, or, where attention is not
    causal, the distance that it sees in both directions."""


class ChunkMask(int):
    """Placeholder for a mask of chunks: their number of tokens, counted from the start of each document."""


class RefusedMask(str):
    """Placeholder for an unsupported mask. The attention function, which has the context, refuses it on all ranks."""


def placeholder(
    *,
    attention_mask: object = None,
    local_size: object = None,
    use_vmap: bool = False,
    mask_function: object = None,
    config: object = None,
    **others: object,
) -> object:
    """Return a placeholder for the caller's mask, which the model would otherwise drop.

    The model takes positions that are not consecutive for packed sequences, and passes a mask function. Ignore it,
    since the attention uses only the layout's positions.
    """
    if attention_mask is not None and not _is_all_ones(attention_mask):
        return RefusedMask("a mask")
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":  # of pairs that causal attention does not see
        return RefusedMask("a mask function")
    if local_size is None:
        return None
    sizes = {WindowMask: "sliding_window", ChunkMask: "attention_chunk_size"}
    kinds = [kind for kind, name in sizes.items() if getattr(config, name, None) == local_size]
    if len(kinds) != 1 or not isinstance(local_size, int):
        return RefusedMask(f"a mask of chunks or windows of {local_size} tokens")
    return kinds[0](local_size)


def _is_all_ones(mask: object) -> bool:
    """True for a mask of a model's own that says nothing. A graph cannot look."""
    return isinstance(mask, Tensor) and mask.dim() == 2 and not torch.compiler.is_compiling() and bool(mask.all())
