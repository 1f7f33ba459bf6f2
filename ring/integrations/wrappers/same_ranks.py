"""Checks that a wrapped model's losses and sequences are over the ranks that average its gradients.

A loss over other ranks has another scale; a sequence with parts on other ranks loses their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from ring.comm.call_order import within_backward
from ring.comm.process_group import ProcessGroupTransport
from ring.integrations.wrappers.modules import differentiable, leaves
from ring.nn import loss_ranks
from ring.nn.context import ContextParallel


def watch(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare the ranks of each forward's `ContextParallel` and of each backward's losses with those of the wrapper.

    The hooks raise ValueError. They do so on every rank, since ranks are compared by the same rule.

    Args:
        model: to be wrapped.
        mesh: given to the wrapper. Losses may be over further ranks of its root mesh, with the same tokens.
    """
    averaged, root = (frozenset(x.mesh.flatten().tolist()) for x in (mesh, mesh._get_root_mesh()))

    @torch.compiler.disable
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for x in () if within_backward() else leaves((args, kwargs)):
            if isinstance(x, ContextParallel) and isinstance(x.transport, ProcessGroupTransport):
                held = frozenset(dist.get_process_group_ranks(x.transport.group))
                if not held <= averaged:
                    raise ValueError(
                        f"mesh of the wrapper must have all ranks of the context, {sorted(held)}, got "
                        f"{sorted(averaged)}"
                    )

    def compare(backward: int) -> None:
        for ranks in loss_ranks.noted(backward):
            if not averaged <= ranks <= root:
                raise ValueError(
                    f"losses must be over the ranks over which the wrapper averages gradients, {sorted(averaged)}, got "
                    f"one over {sorted(ranks)}: give both the same mesh"
                )

    def begin(grad: Tensor) -> None:
        # At the end: a loss within the model comes after the gradient of what the model returns.
        number = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(lambda: compare(number))

    @torch.compiler.disable
    def after(module: nn.Module, inputs: object, output: object) -> None:
        for x in differentiable(output):
            x.register_hook(begin)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, prepend=True)
