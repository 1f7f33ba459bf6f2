"""An attention module within a plan of torch's `parallelize_module`: its calls get the handle of the sharded sequence.

    parallelize_module(model, mesh["context"], {"layers.*.attention": RingParallel(context)})

The module's forward takes query, key and value heads first, (B, H, N, D), and the keyword `context`, as
`ring.nn.RingAttention` does. Tensors may be the local shards, or DTensors sharded along the tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ring.layout import Layout
from ring.nn.context import ContextParallel


class RingParallel(ParallelStyle):
    """Runs a module with a `ContextParallel` handle.

    token_dim: of the tensors that the module takes and gives. use_local_output: whether it gives the local shard (as
    torch's other styles do), or a DTensor sharded along the tokens.

    DTensors are taken if they are sharded along the tokens, over the handle's ranks, as the layout says: a DTensor over
    p ranks is cut into p contiguous parts, so that the layout has to be that one, `dtensor_layout(n, p)`. Everything
    else is refused on every rank, among it a zigzag layout, whose DTensor would say that it holds other tokens.

    Raises ValueError for a mesh of other ranks than the handle's, and for a module that takes no `context`.
    """

    def __init__(self, context: ContextParallel, *, token_dim: int = 2, use_local_output: bool = True) -> None:
        super().__init__()
        self.context, self.token_dim, self.use_local_output = context, token_dim, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_mesh(device_mesh, self.context)
        if "context" not in inspect.signature(module.forward).parameters:
            raise ValueError(f"module must take the keyword context, got {type(module).__name__}, which does not")
        if not self.use_local_output and self.context.layout != dtensor_layout(
            self.context.layout.n, device_mesh.size()
        ):
            raise ValueError("use_local_output=False needs the layout of a DTensor, got one of other shards")

        def take(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return self._take(module, given, named)

        def give(module: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
            return self._whole(out, device_mesh)

        module.register_forward_pre_hook(take, with_kwargs=True)
        if not self.use_local_output:
            module.register_forward_hook(give)
        return module

    def _take(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with local shards for DTensors, and with the handle."""
        bound = inspect.signature(module.forward).bind_partial(*given, **named)
        try:
            if bound.arguments.get("context") not in (None, self.context):
                raise ValueError("context must be left out: the module runs with that of its RingParallel, got another")
            for name, x in bound.arguments.items():
                if isinstance(x, DTensor):
                    bound.arguments[name] = self._local(name, x)
        except (ValueError, NotImplementedError) as error:
            self.context.raise_everywhere(error)
        bound.arguments["context"] = self.context
        return bound.args, bound.kwargs

    def _local(self, name: str, x: DTensor) -> torch.Tensor:
        """The local shard of a DTensor that is sharded as the layout says. ValueError for any other."""
        layout, ranks = self.context.layout, _ranks(x.device_mesh)
        if ranks != _ranks_of(self.context):
            raise ValueError(
                f"{name} must be a DTensor over the handle's ranks in their order, {_ranks_of(self.context)}, "
                f"got {ranks}"
            )
        if x.placements != (Shard(self.token_dim % x.ndim),):
            raise ValueError(f"{name} must be sharded along its tokens, Shard({self.token_dim}), got {x.placements}")
        if x.shape[self.token_dim] != layout.n:
            raise ValueError(f"{name} must have the {layout.n} tokens of the layout, got {x.shape[self.token_dim]}")
        if layout != dtensor_layout(layout.n, len(ranks)):
            raise ValueError(
                f"{name} must hold on each rank the tokens that the layout gives it, got a DTensor, of contiguous "
                "parts: give the local shard, or a handle with the layout dtensor_layout(n, p)"
            )
        return x.to_local()

    def _whole(self, out: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """The DTensor of which `out` is the local shard. Its shards may be of several sizes, so its shape is stated."""
        shape = list(out.shape)
        shape[self.token_dim] = self.context.layout.n
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(self.token_dim)]
        return DTensor.from_local(out.contiguous(), mesh, placements, shape=torch.Size(shape), stride=stride)


def dtensor_layout(n: int, p: int) -> Layout:
    """Who holds which tokens of a DTensor of n that is sharded over p ranks: ceil(n / p) each, until there are none."""
    share = -(-n // p)
    return Layout.from_cuts(range(n), [min(rank * share, n) for rank in range(p + 1)])


def _check_mesh(mesh: DeviceMesh, context: ContextParallel) -> None:
    if mesh.ndim != 1 or _ranks(mesh) != _ranks_of(context):
        raise ValueError(
            f"device_mesh must have the handle's ranks in their order, {_ranks_of(context)}, got {mesh.mesh.tolist()}"
        )


def _ranks(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten()]


def _ranks_of(context: ContextParallel) -> list[int]:
    """The handle's ranks by their numbers in the world, in the order of the group, which torch sorts. The order of a
    mesh may be another, and says which rank has which shard of a DTensor.
    """
    group = getattr(context.transport, "group", None)
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
