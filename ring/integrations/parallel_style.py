"""Style for a plan of torch's `parallelize_module`: passes the handle of the sharded sequence to an attention module.

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

    Input DTensors must be sharded along the tokens, over the handle's ranks, and by the layout. A DTensor over p ranks
    is cut into p contiguous parts, so the layout must be `dtensor_layout(n, p)`. Anything else is refused on every
    rank, including a zigzag layout, with which the DTensor would claim to hold other tokens.

    Args:
        context: handle of the sharded sequence.
        token_dim: of the module's inputs and output.
        use_local_output: return the local shard, as torch's other styles do; False: a DTensor sharded along the tokens.

    Raises:
        ValueError: when applied, for a mesh whose ranks are not the handle's, a module that takes no `context`, or a
            layout other than `dtensor_layout(n, p)` with use_local_output=False.
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
            raise ValueError("use_local_output=False needs the layout of a DTensor, got a layout with other shards")

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return self._bind(module, args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
            return self._as_dtensor(out, device_mesh)

        module.register_forward_pre_hook(before, with_kwargs=True)
        if not self.use_local_output:
            module.register_forward_hook(after)
        return module

    def _bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace DTensors by their local shards, and add the handle to the arguments."""
        try:
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
            if bound.arguments.get("context") not in (None, self.context):
                raise ValueError("context must be left out: RingParallel passes its own, got another")
            for name, x in bound.arguments.items():
                if isinstance(x, DTensor):
                    bound.arguments[name] = self._local(name, x)
        except Exception as error:  # of any type: the other ranks must raise it too
            self.context.raise_everywhere(error)
        bound.arguments["context"] = self.context
        return bound.args, bound.kwargs

    def _local(self, name: str, x: DTensor) -> torch.Tensor:
        """Return the local shard of a DTensor that is sharded by the layout. ValueError for any other."""
        layout, ranks = self.context.layout, _ranks(x.device_mesh)
        if ranks != _world_ranks(self.context):
            raise ValueError(
                f"{name} must be a DTensor over the handle's ranks in their order, {_world_ranks(self.context)}, "
                f"got {ranks}"
            )
        if x.placements != (Shard(self.token_dim % x.ndim),):
            raise ValueError(f"{name} must be sharded along its tokens, Shard({self.token_dim}), got {x.placements}")
        if x.shape[self.token_dim] != layout.n:
            raise ValueError(f"{name} must have the {layout.n} tokens of the layout, got {x.shape[self.token_dim]}")
        if layout != dtensor_layout(layout.n, len(ranks)):
            raise ValueError(
                f"{name} must hold the tokens of the layout on each rank, got a DTensor, of contiguous parts: pass the "
                "local shard, or a handle with the layout dtensor_layout(n, p)"
            )
        return x.to_local()

    def _as_dtensor(self, out: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor with the local shard `out`. Sets the shape, since shards may have unequal sizes."""
        shape = list(out.shape)
        shape[self.token_dim] = self.context.layout.n
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(self.token_dim)]
        return DTensor.from_local(out.contiguous(), mesh, placements, shape=torch.Size(shape), stride=stride)


def dtensor_layout(n: int, p: int) -> Layout:
    """Return the layout of a DTensor of n tokens sharded over p ranks: ceil(n / p) each, until none are left.

    Args:
        n, p: numbers of tokens, 0 to 2^40, and of ranks, at least 1.
    """
    share = -(-n // p)
    return Layout.from_cuts(range(n), [min(rank * share, n) for rank in range(p + 1)])


def _check_mesh(mesh: DeviceMesh, context: ContextParallel) -> None:
    ranks = _world_ranks(context)
    if mesh.ndim != 1 or _ranks(mesh) != ranks:
        raise ValueError(f"device_mesh must have the handle's ranks in their order, {ranks}, got {mesh.mesh.tolist()}")


def _ranks(mesh: DeviceMesh) -> list[int]:
    return [int(rank) for rank in mesh.mesh.flatten()]


def _world_ranks(context: ContextParallel) -> list[int]:
    """World ranks of the handle, in the order of the group, which torch sorts. The order of a mesh, which places the
    shards of a DTensor, may differ.
    """
    group = getattr(context.transport, "group", None)
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
