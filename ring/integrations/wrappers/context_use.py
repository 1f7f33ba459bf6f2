"""Refuses a model that ignores the handle of its sequence: it would attend within each shard alone.

A model of transformers that is not prepared takes any keyword, and hands it to an attention that knows none. A model in
which some layers alone ignore the handle, or whose layers have it as an attribute, is not noticed here: hold it to one
process by `python -m verification model`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ring.comm.call_order import Calls, within_backward
from ring.integrations.wrappers.modules import leaves
from ring.nn.context import ContextParallel


def require_use(model: nn.Module) -> None:
    """Have the first forward with a sharded sequence raise ValueError, on every rank, unless it calls on its group.

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
        if before and all(calls.number == number for calls, number in before):
            raise ValueError(
                f"context must reach the model's attention, got a {type(module).__name__} that ignores it: each rank "
                "would compute its shard alone. Prepare a model of transformers before it is wrapped: "
                "ring.integrations.transformers.prepare(model, mesh['context'])"
            )
        if before:
            for hook in hooks:
                hook.remove()

    hooks = (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, prepend=True),
    )
