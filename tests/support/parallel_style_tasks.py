"""What ranks do with `RingParallel` in a plan of torch's `parallelize_module`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from reference import Pattern
from ring import Layout
from ring.nn import ContextParallel, RingAttention
from ring.nn.frameworks.parallel_style import RingParallel, dtensor_layout

TOKENS = 13  # 4 ranks hold 4, 4, 4 and 1


class Inner(nn.Module):
    """A model with an inner attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RingAttention(Pattern.dense(causal=True))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.attention(q, k, value=v, enable_gqa=True)
        return out


def whole() -> list[Tensor]:
    """q, k, v and the gradient of the output, heads first, the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(2, heads, TOKENS, 6, dtype=torch.float64, generator=draw) for heads in (4, 2, 2, 4)]


def exact() -> list[Tensor]:
    """The output, dq, dk and dv in one process."""
    q, k, v, dout = whole()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def made(ranks: list[int], layout: Layout, use_local_output: bool = True) -> tuple[DeviceMesh, nn.Module]:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("context",))
    style = RingParallel(ContextParallel(layout, mesh), use_local_output=use_local_output)
    return mesh, parallelize_module(Inner(), mesh, {"attention": style})


def with_shards(kind: str) -> float:
    """The greatest error with the local shards of any layout."""
    world, rank = dist.get_world_size(), dist.get_rank()
    layout: Layout = getattr(Layout, kind)(TOKENS, world)
    _, model = made(list(range(world)), layout)
    q, k, v, dout = (layout.shard(x, rank, 2) for x in whole())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = model(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    return max(float((x - layout.shard(y, rank, 2)).abs().max()) for x, y in zip(found, exact(), strict=True))


def with_dtensors(use_local_output: bool) -> float:
    """The greatest error with DTensors that are cut as torch cuts them."""
    world = dist.get_world_size()
    mesh, model = made(list(range(world)), dtensor_layout(TOKENS, world), use_local_output)
    q, k, v, dout = (distribute_tensor(x, mesh, [Shard(2)]) for x in whole())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = model(*leaves)
    assert isinstance(out, DTensor) is not use_local_output
    found = [out, *torch.autograd.grad(out, leaves, dout.to_local() if use_local_output else dout)]
    wanted = [distribute_tensor(x, mesh, [Shard(2)]).to_local() for x in exact()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in found]
    return max(float((x - y).abs().max()) for x, y in zip(local, wanted, strict=True))


def refused(name: str) -> tuple[str, float]:
    """What a wrong call is refused with, on all ranks or on rank 1 alone, and the error of a right one after it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    zigzag = name == "another layout"
    layout = Layout.zigzag(TOKENS, world) if zigzag else dtensor_layout(TOKENS, world)
    mesh, model = made(list(range(world)), layout)
    other = DeviceMesh("cpu", [*range(1, world), 0], mesh_dim_names=("context",))
    right = [distribute_tensor(x, mesh, [Shard(2)]) for x in whole()[:3]]
    if zigzag and rank != 1:
        right = [layout.shard(x, rank, 2) for x in whole()[:3]]  # type: ignore[misc]
    wrong: dict[str, Callable[[Tensor], Tensor]] = {
        "replicated": lambda x: distribute_tensor(x, mesh, [Replicate()]),
        "along heads": lambda x: distribute_tensor(x, mesh, [Shard(1)]),
        "other tokens": lambda x: distribute_tensor(torch.cat((x, x), 2), mesh, [Shard(2)]),
        "other ranks": lambda x: distribute_tensor(x, other, [Shard(2)]),
        "another layout": lambda x: distribute_tensor(x, mesh, [Shard(2)]),
    }
    key = wrong[name](whole()[1])
    q, k, v = right
    said = "nothing"
    try:
        model(q, key if rank == 1 else k, v)
    except ValueError as error:
        said = str(error)
    return said, with_dtensors(use_local_output=True)


def refused_plans() -> list[str]:
    world = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("context",))
    other = DeviceMesh("cpu", [*range(1, world), 0], mesh_dim_names=("context",))
    context = ContextParallel(Layout.zigzag(TOKENS, world), mesh)
    plans = [
        lambda: parallelize_module(Inner(), other, {"attention": RingParallel(context)}),
        lambda: parallelize_module(nn.Linear(2, 2), mesh, RingParallel(context)),
        lambda: parallelize_module(Inner(), mesh, {"attention": RingParallel(context, use_local_output=False)}),
    ]
    said = []
    for plan in plans:
        try:
            plan()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said
