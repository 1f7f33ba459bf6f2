"""Refuses a model of transformers that ignores the handle of its sequence: it would attend within each shard alone.

One that is not prepared takes any keyword, and hands it to an attention that knows none. Other models may send messages
of their own. Where some layers alone ignore the handle, or have it as an attribute, nothing is noticed here: hold the
model to one process by `python -m verification model`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ring.comm.call_order import Calls, within_backward
from ring.integrations.wrappers.modules import leaves
from ring.nn.context import ContextParallel

OF_ONE_PROCESS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")  # of transformers


def require_use(model: nn.Module) -> None:
    """Have the first forward with a sharded sequence raise ValueError, on every rank, if transformers attends to it.

    Args:
        model: to be wrapped.
    """
    before: list[tuple[Calls, int]] = []  # calls on the group of each handle, and how many there were

    @torch.compiler.disable
    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        handles = () if within_backward() else leaves((args, kwargs))
        found = [x.transport.calls for x in handles if isinstance(x, ContextParallel) and x.world_size > 1]
        before[:] = [(calls, calls.number) for calls in found]

    @torch.compiler.disable
    def end(module: nn.Module, inputs: object, output: object) -> None:
        if not before:
            return
        for hook in hooks:
            hook.remove()
        if all(calls.number == number for calls, number in before) and (name := _attention_of_one_process(module)):
            raise ValueError(
                f"model must be prepared before it is wrapped, got one whose attention, {name!r}, ignores context: "
                "each rank would compute its shard alone. Write "
                "ring.integrations.transformers.prepare(model, mesh['context'])"
            )

    hooks = (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, prepend=True),
    )


def _attention_of_one_process(model: nn.Module) -> str | None:
    """Return the name of the attention of a model of transformers in the model, if it is one of transformers' own."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    names = (x.config._attn_implementation for x in model.modules() if isinstance(x, PreTrainedModel))
    return next((name for name in names if name in OF_ONE_PROCESS), None)
