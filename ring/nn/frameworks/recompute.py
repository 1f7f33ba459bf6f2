"""Activation checkpointing: a layer keeps only its inputs, and is computed again in backward.

    recompute.wrap(model, DecoderLayer)                                         # all computed again
    recompute.wrap(model, DecoderLayer, keep_attention=True)                  # all but the ring attention
    torch.utils.checkpoint.checkpoint(layer, x, context, use_reentrant=False, context_fn=recompute.attention_kept)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute.attention_kept})  # HF

A layer that is computed again runs its ring forward again: messages and all. With the attention kept its output and
lse stay in memory, O(tokens of this rank), and nothing is sent twice.

The `ContextParallel` handle is an argument of the layer, so the second forward has the layout and the group of the
first. A module that finds its layout elsewhere (a global, an attribute that changes between batches) may not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ring.nn.frameworks.modules import modules_of


def attention_kept() -> Any:
    """For `context_fn` of `torch.utils.checkpoint.checkpoint`: what ring attention returns is kept, all else is not."""
    return create_selective_checkpoint_contexts(
        [torch.ops.ring.attention.default, torch.ops.ring.attention_forward.default]
    )


def wrap(
    model: nn.Module,
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    *,
    keep_attention: bool = False,
    reentrant: bool = False,
) -> None:
    """Have each layer of these classes computed again in backward; changes the model in place, before it is wrapped.

    reentrant: by the older way of torch, in which a layer whose inputs require no gradient has none, and whose
    gradients cannot be asked of `torch.autograd.grad`.

    Raises ValueError where the model has no such layer, NotImplementedError for a reentrant recomputation that keeps
    the attention.
    """
    if reentrant and keep_attention:
        raise NotImplementedError("keep_attention=True needs reentrant=False: the reentrant way keeps inputs only")
    wanted = set(modules_of(model, layers))
    way = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    options: dict[str, Any] = {"context_fn": attention_kept} if keep_attention else {}
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=way, **options)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in wanted)
