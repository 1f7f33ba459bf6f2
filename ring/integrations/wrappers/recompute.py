"""Activation checkpointing: a layer saves only its inputs, and is recomputed in backward.

    recompute.wrap(model, DecoderLayer)                                         # recomputes everything
    recompute.wrap(model, DecoderLayer, keep_attention=True)                    # everything but the ring attention
    torch.utils.checkpoint.checkpoint(layer, x, context, use_reentrant=False, context_fn=recompute.attention_kept)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute.attention_kept})  # HF

A recomputed layer runs its ring forward again, with all messages. If the attention is kept, its output and lse stay in
memory, O(tokens of this rank), and nothing is sent twice.

The `ContextParallel` handle is an argument of the layer, so the second forward has the layout and the group of the
first. A layout from elsewhere (a global, an attribute that changes between batches) may differ.
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

from ring.integrations.wrappers.modules import find_modules


def attention_kept() -> Any:
    """Return contexts for `context_fn` of torch's `checkpoint` that save only the outputs of ring attention."""
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
    """Recompute each layer of these classes in backward. Changes the model in place; call it before DDP or FSDP.

    Args:
        model: in which layers are wrapped.
        layers: classes of the modules to recompute.
        keep_attention: True to save the outputs of ring attention instead of running it again.
        reentrant: use torch's older implementation, which computes no gradients in a layer whose inputs require none,
            and does not support `torch.autograd.grad`.

    Raises:
        ValueError, NotImplementedError: the model has no such layer; reentrant and keep_attention are both True.
    """
    if reentrant and keep_attention:
        raise NotImplementedError(
            "keep_attention=True needs reentrant=False: reentrant checkpointing saves only inputs"
        )
    selected = set(find_modules(model, layers))
    implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    options: dict[str, Any] = {"context_fn": attention_kept} if keep_attention else {}
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation, **options)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in selected)
