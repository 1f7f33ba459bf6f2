"""Masks of Hugging Face's models: placeholders, through their registry of functions, and patterns of layers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from reference.pattern import Branch, Pattern
from ring.integrations.transformers.token_types import ANY_LAYER, Masks, has_causal, whole_mask


class WindowMask(int):
    """Placeholder for a mask of a window: tokens that a query sees, including itself, or, where attention is not
    causal, the distance that it sees in both directions."""


class CausalWindowMask(WindowMask):
    """Placeholder for the mask of a causal window in a model whose layers say that they are not causal."""


class CausalMask(str):
    """Placeholder for a causal mask in such a model. Other models have none. The model within gets it as its mask."""

    ndim, shape = 0, (0,)  # transformers' functions read them


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
    known = attention_mask if isinstance(attention_mask, CausalMask) else whole_mask(mask_function)
    if known is not None:
        return known
    if attention_mask is not None and not _is_all_ones(attention_mask):
        return RefusedMask("a mask")
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":  # of pairs that causal attention does not see
        return RefusedMask("a mask function")
    # Layers of PaliGemma have is_causal=False, whatever mask they get.
    causal = getattr(config, "use_bidirectional_attention", None) is True and has_causal(mask_function)
    if local_size is None:
        return CausalMask("causal") if causal else None
    sizes = {WindowMask: "sliding_window", ChunkMask: "attention_chunk_size"}
    kinds = [kind for kind, name in sizes.items() if getattr(config, name, None) == local_size]
    if len(kinds) != 1 or not isinstance(local_size, int):
        return RefusedMask(f"a mask of chunks or windows of {local_size} tokens")
    return CausalWindowMask(local_size) if causal and kinds[0] is WindowMask else kinds[0](local_size)


def _is_all_ones(mask: object) -> bool:
    """True for a mask of a model's own that says nothing. A graph cannot look."""
    return isinstance(mask, Tensor) and mask.dim() == 2 and not torch.compiler.is_compiling() and bool(mask.all())


def layer_pattern(
    module: nn.Module, mask: object, sliding_window: object, causal: bool, pattern: object, typed: Masks | None = None
) -> Pattern:
    """Return the pattern of a layer: its model's chunks, window or dense attention, or the caller's pattern.

    Args:
        module: the layer's attention.
        mask: a placeholder, or None.
        sliding_window: of the layer's call; one more than the mask's where attention is not causal, as models have it.
        causal: the layer's attention is causal.
        pattern: the caller's; None for the model's own attention.
        typed: masks of token types; None without them.

    Raises:
        ValueError, NotImplementedError: they contradict each other.
    """
    _check_chunks(module, mask)
    if typed is not None:
        return _of_types(typed, mask, _window(mask, sliding_window, causal), causal, pattern)
    if isinstance(mask, ChunkMask):
        return _chunks(mask, sliding_window, causal, pattern)
    window = _window(mask, sliding_window, causal)
    if pattern is None:
        return _dense(causal, window, None)
    if window is not None:
        raise ValueError(f"pattern must be None for a layer with a sliding window of {window + 1} tokens")
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern or None, got {pattern!r}")
    if pattern.causal is not causal and not pattern.has_slices:
        raise ValueError(f"pattern must be causal as the model is, causal={causal}, got causal={pattern.causal}")
    return pattern


def _check_chunks(module: nn.Module, mask: object) -> None:
    """Raise for a layer in chunks that got another mask, and so would see all tokens.

    Not in a graph, which would be compiled anew for each layer: `prepare` runs every layer eagerly.
    """
    if torch.compiler.is_compiling() or isinstance(mask, ChunkMask):
        return
    kinds, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and isinstance(layer, int) and kinds[layer] == "chunked_attention":
        raise NotImplementedError(
            f"attention_mask must be the model's own of chunks for a layer of 'chunked_attention', got {mask!r}"
        )


def _of_types(typed: Masks, mask: object, window: int | None, causal: bool, pattern: object) -> Pattern:
    """Return the mask of a layer's kind, which its own placeholder of a call without types tells."""
    kind = "full_attention" if window is None else "sliding_attention"
    found = typed.get(kind, typed.get(ANY_LAYER))
    if found is None or isinstance(mask, ChunkMask) or not causal:
        raise NotImplementedError(
            f"token types must be left out for layers that are not causal, or in chunks, got causal={causal}, {mask!r}"
        )
    if pattern is not None:
        raise ValueError("pattern must be None for a call with token types, of which the model makes its masks")
    return found


def _chunks(tokens: ChunkMask, sliding_window: object, causal: bool, pattern: object) -> Pattern:
    if not causal or sliding_window is not None:
        raise NotImplementedError(
            f"attention in chunks must be causal, without a sliding window, got chunks of {tokens} tokens, "
            f"causal={causal}, sliding_window={sliding_window!r}"
        )
    if pattern is not None:
        raise ValueError(f"pattern must be None for a layer with attention in chunks of {tokens} tokens")
    return _dense(True, None, int(tokens))


def _window(mask: object, sliding_window: object, causal: bool) -> int | None:
    """Greatest distance of the keys that a query of the layer sees; None for all."""
    distance = None if not isinstance(mask, WindowMask) else int(mask) - 1 if causal else int(mask)
    if sliding_window is None:
        return distance
    tokens = sliding_window
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or distance not in (None, tokens - 1):
        also = "" if distance is None else f" beside a mask of {distance + 1}"
        raise ValueError(f"sliding_window must be at least 1 token, as the model's mask has it, got {tokens!r}{also}")
    if not causal and distance is None:
        raise NotImplementedError(
            f"sliding_window must come with the model's own mask where attention is not causal, got {tokens} without: "
            "models differ in the keys behind a query"
        )
    return tokens - 1


@lru_cache
def _dense(causal: bool, window: int | None, chunk: int | None) -> Pattern:
    return Pattern((Branch(chunk, window=window),), causal)
