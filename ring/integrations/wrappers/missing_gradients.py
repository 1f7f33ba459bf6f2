"""Fills missing gradients with zeros, so that all ranks reduce the same parameters.

DDP and FSDP average the gradients that a rank has. If another rank has others, its messages are paired with the wrong
ones. So before a wrapper averages, zeros are put in; and after the backward the ranks compare, once, so that the
gradient of a parameter that no rank used stays None, as in one process: an optimizer passes over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ring.comm.call_order import within_backward
from ring.comm.transport import MissingRanks
from ring.integrations.wrappers.modules import differentiable
from ring.nn.batch_group import BatchRanks


class _EndOfBackward:
    """Two functions at the end of each backward, before and after those of the wrapper."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after, self._queued = before, after, False

    def watch(self, module: nn.Module) -> None:
        """Begin at the gradient of what a module returns. Its hooks of the wrapper come later."""
        module.register_forward_hook(self._hook, prepend=True)

    @torch.compiler.disable
    def _hook(self, module: nn.Module, inputs: object, output: object) -> None:
        if not within_backward():
            self._queued = False  # should a backward have failed
        for x in differentiable(output):
            x.register_hook(self._queue)

    def _queue(self, grad: Tensor) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._before()
        Variable._execution_engine.queue_callback(self._last)  # behind the wrapper's own

    def _last(self) -> None:
        self._queued = False
        self._after()


class _Lacking:
    """Parameters whose gradient is zeros that stand for none, by their numbers."""

    def __init__(self, number: int, ranks: BatchRanks) -> None:
        self._lacks, self._ranks = torch.zeros(number, dtype=torch.uint8), ranks

    def note(self, number: int, lacks: bool) -> None:
        self._lacks[number] = lacks

    def settle(self, parameters: Sequence[Tensor]) -> None:
        """Set gradients to None that are zeros on every rank. Collective."""
        digest = hashlib.blake2b(self._lacks.numpy().tobytes(), digest_size=16).digest()
        with self._ranks.lock():
            try:
                equal = self._ranks.all_equal(digest)
            except MissingRanks as missing:
                raise RuntimeError(missing.message("the end of a backward")) from missing
            nowhere = self._lacks if equal else self._ranks.gather(self._lacks).all(0)
        for number in nowhere.nonzero().flatten().tolist():
            parameters[number].grad = None
        self._lacks.zero_()


# --- FSDP -------------------------------------------------------------------------------------------------------------


class FilledUnits:
    """Gradients of FSDP's units: of a unit that ran, all its parameters are reduced.

    Args:
        model: sharded, with all its units.
        ranks: over which it is sharded.
    """

    def __init__(self, model: FSDPModule, ranks: BatchRanks) -> None:
        assert isinstance(model, nn.Module)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = [group for unit in units for group in _groups(unit)]
        self._numbers = {x: number for number, x in enumerate(x for group in self._groups for x in group.fsdp_params)}
        self._lacking = _Lacking(len(self._numbers), ranks)
        end = _EndOfBackward(self._fill_rest, self._settle)
        for unit in units:
            self._watch(unit)
            end.watch(unit)

    def _watch(self, unit: Any) -> None:
        groups = _groups(unit)

        @torch.compiler.disable
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Hooks on what FSDP's own function returned run right before it reduces the unit's gradients.
            for x in differentiable((args, kwargs)):
                x.register_hook(lambda grad: self._fill(groups))

        unit.register_forward_pre_hook(hook, with_kwargs=True)

    def _fill(self, groups: Sequence[Any]) -> None:
        for x in [x for group in groups if group.reduce_grads for x in group.fsdp_params]:
            whole = getattr(x, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is not None or x.unsharded_accumulated_grad is not None:
                # Of a unit that runs twice, parameters have no gradient before the first call's backward.
                self._lacking.note(self._numbers[x], False)
                continue
            whole.grad = torch.zeros_like(whole)
            if x.sharded_param.grad is None:
                self._lacking.note(self._numbers[x], True)

    def _fill_rest(self) -> None:
        """Fill the units that FSDP reduces at the end, since their inputs need no gradient."""
        self._fill([group for group in self._groups if group._training_state.name == "PRE_BACKWARD"])

    def _settle(self) -> None:
        if any(group.reduce_grads for group in self._groups):
            self._lacking.settle([x.sharded_param for x in self._numbers])


def _groups(unit: Any) -> list[Any]:
    """FSDP's groups of a unit's parameters. Private: there is no other way to the whole ones and to what is next."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 has one group a unit


# --- DDP --------------------------------------------------------------------------------------------------------------


class FilledBuckets:
    """Gradients of DDP: parameters that a backward did not reach are marked as ready, as if it had.

    Args:
        model: wrapped.
        ranks: over which it averages.
    """

    def __init__(self, model: DistributedDataParallel, ranks: BatchRanks) -> None:
        self._model = model
        self._parameters = [x for x in model.module.parameters() if x.requires_grad]
        self._reached = reached = set[int]()
        self._lacking = _Lacking(len(self._parameters), ranks)
        for x in self._parameters:
            x.register_post_accumulate_grad_hook(lambda x: reached.add(id(x)))  # self would never be freed: a C++ cycle
        _EndOfBackward(self._fill, self._settle).watch(model.module)

    def _fill(self) -> None:
        missing = [number for number, x in enumerate(self._parameters) if id(x) not in self._reached]
        if missing and self._model.require_backward_grad_sync:
            for number in missing:
                self._lacking.note(number, self._parameters[number].grad is None)
            with torch.enable_grad():
                _Unused.apply(*(self._parameters[number] for number in missing)).backward()
        self._reached.clear()

    def _settle(self) -> None:
        if self._model.require_backward_grad_sync:
            self._lacking.settle(self._parameters)


class _Unused(torch.autograd.Function):
    """A function of parameters on which it does not depend: backward reaches them, without gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.number = len(parameters)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.number
