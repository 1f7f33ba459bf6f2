"""Pattern of a layer of Hugging Face's models, from the placeholder of its mask and the arguments of its attention."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from reference.pattern import Branch, Pattern
from ring.nn.frameworks.transformers_masks import ChunkMask, WindowMask


def layer_pattern(module: nn.Module, mask: object, sliding_window: object, causal: bool, pattern: object) -> Pattern:
    """Return the pattern of a layer: its model's chunks, window or dense attention, or the caller's pattern.

    Args:
        module: the layer's attention.
        mask: a placeholder, or None.
        sliding_window: of the layer's call; one more than the mask's where attention is not causal, as models have it.
        causal: the layer's attention is causal.
        pattern: the caller's; None for the model's own attention.

    Raises:
        ValueError, NotImplementedError: they contradict each other.
    """
    _check_chunks(module, mask)
    if isinstance(mask, ChunkMask):
        return _chunks(mask, sliding_window, causal, pattern)
    window = _window(mask, sliding_window, causal)
    if pattern is None:
        return _dense(causal, window, None)
    if window is not None:
        raise ValueError(f"pattern must be None for a layer with a sliding window of {window + 1} tokens")
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern or None, got {pattern!r}")
    if pattern.causal is not causal:
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
