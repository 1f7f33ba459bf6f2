"""Errors of a model on one rank: the other ranks, which wait in its attention or have run it, raise them too."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from ring.comm.rank_error import described, of_kind
from ring.comm.transport import MissingRanks
from ring.consensus import compare, is_joint
from ring.nn.batch_group import BatchRanks
from ring.nn.context import ContextParallel
from ring.nn.same_weights.chunked_calls import described_module

T = TypeVar("T")


def run_together(
    doing: str, run: Callable[[], T], model: nn.Module, context: ContextParallel, ranks: BatchRanks
) -> T:  # fmt: skip
    """Return run(), which calls the model, once all ranks of the handle have run it. An error of one is raised on all.

    Their calls on the handle's group are in `run`, or at its end: there the rank with the error meets them. Then it is
    raised in the next call of all ranks of the batch, if they train, for those of other handles.
    """
    try:
        try:
            result = run()
        except Exception as error:  # of any type: the other ranks must raise it too
            if context.world_size == 1 or is_joint(error, context.transport):
                raise
            context.raise_everywhere(_with_place(error, model))
        context.agree(doing, lambda: ({}, None))
    except Exception as error:
        others_wait = ranks.world_size > context.world_size and context.check and torch.is_grad_enabled()
        if not others_wait or isinstance(error.__cause__, MissingRanks):
            raise
        compare(doing, {}, error if context.world_size > 1 else _with_place(error, model), ranks)
        raise
    return result


def _with_place(error: Exception, model: nn.Module) -> Exception:
    """Return an error of its kind that names the module, as all ranks raise it. This rank shows where, in a note."""
    names = {id(module): described_module(name, module) for name, module in model.named_modules()}
    called = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = next((names[own] for own in reversed(called) if own in names), "")
    kind, text = described(error)
    placed = of_kind(kind, text if not where or where in text else f"{text}, in {where}")
    error.add_note("".join(traceback.format_tb(error.__traceback__)))  # its frames hold tensors, and are dropped
    placed.__cause__ = error
    return placed
