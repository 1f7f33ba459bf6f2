"""Placeholders for the masks that Hugging Face's models make, through their registry of mask functions."""

from __future__ import annotations


class WindowMask(int):
    """Placeholder for a mask: number of tokens that a query sees, including itself."""


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
    if attention_mask is not None:
        return RefusedMask("a mask")
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":  # of pairs that causal attention does not see
        return RefusedMask("a mask function")
    if local_size is None:
        return None
    chunks = getattr(config, "attention_chunk_size", None)
    if chunks is None and isinstance(local_size, int) and local_size == getattr(config, "sliding_window", None):
        return WindowMask(local_size)
    return RefusedMask(f"a mask of chunks or windows of {local_size} tokens")
