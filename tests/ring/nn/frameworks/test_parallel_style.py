"""`RingParallel` in a plan of `parallelize_module`: shards, DTensors, and which of those are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
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
from tests.support.framework_example import EXACT, mesh_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLD = 4
TOKENS = 13  # 4 ranks hold 4, 4, 4 and 1


class Inner(nn.Module):
    """A model with an inner attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RingAttention(Pattern.dense(causal=True))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        out: Tensor = self.attention(q, k, value=v, enable_gqa=True, **named)
        return out


def context_mesh(first: int = 0) -> DeviceMesh:
    return mesh_of(tuple((first + rank) % WORLD for rank in range(WORLD)), ("context",))


def planned(layout: Layout, use_local_output: bool = True) -> nn.Module:
    style = RingParallel(ContextParallel(layout, context_mesh()), use_local_output=use_local_output)
    return parallelize_module(Inner(), context_mesh(), {"attention": style})


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of the output, whole, heads first, the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(2, heads, TOKENS, 6, dtype=torch.float64, generator=draw) for heads in (4, 2, 2, 4)]


def exact() -> list[Tensor]:
    """The output, dq, dk and dv in one process."""
    q, k, v, dout = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _run_shards(kind: str) -> None:
    rank = dist.get_rank()
    layout: Layout = getattr(Layout, kind)(TOKENS, WORLD)
    q, k, v, dout = (layout.shard(x, rank, 2) for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = planned(layout)(*leaves)
    for x, y in zip([out, *torch.autograd.grad(out, leaves, dout)], exact(), strict=True):
        torch.testing.assert_close(x, layout.shard(y, rank, 2), rtol=0, atol=EXACT)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_local_shards(ranks: Ranks, kind: str) -> None:
    ranks(WORLD).run(_run_shards, kind)


def _run_dtensors(use_local_output: bool) -> None:
    """DTensors that are cut as torch cuts them."""
    mesh = context_mesh()
    q, k, v, dout = (distribute_tensor(x, mesh, [Shard(2)]) for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = planned(dtensor_layout(TOKENS, WORLD), use_local_output)(*leaves)
    assert isinstance(out, DTensor) is not use_local_output
    results = [out, *torch.autograd.grad(out, leaves, dout.to_local() if use_local_output else dout)]
    for x, y in zip(results, exact(), strict=True):
        local = x.to_local() if isinstance(x, DTensor) else x
        torch.testing.assert_close(local, distribute_tensor(y, mesh, [Shard(2)]).to_local(), rtol=0, atol=EXACT)


@pytest.mark.parametrize("use_local_output", [True, False])
def test_dtensors(ranks: Ranks, use_local_output: bool) -> None:
    ranks(WORLD).run(_run_dtensors, use_local_output)


@pytest.mark.parametrize(
    ("n", "p", "counts"), [(13, 4, (4, 4, 4, 1)), (9, 4, (3, 3, 3, 0)), (5, 4, (2, 2, 1, 0)), (8, 2, (4, 4))]
)
def test_the_layout_of_a_dtensor_is_cut_as_torch_cuts(n: int, p: int, counts: tuple[int, ...]) -> None:
    layout = dtensor_layout(n, p)
    assert tuple(layout.counts) == counts == tuple(len(x) for x in torch.arange(n).chunk(p)) + (0,) * counts.count(0)
    assert torch.cat([torch.as_tensor(layout.positions(rank)) for rank in range(p)]).tolist() == list(range(n))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "replicated": (
        lambda x: distribute_tensor(x, context_mesh(), [Replicate()]),
        "key must be sharded along its tokens, Shard(2), got (Replicate(),)",
    ),
    "along heads": (
        lambda x: distribute_tensor(x, context_mesh(), [Shard(1)]), "key must be sharded along its tokens"
    ),
    "other tokens": (
        lambda x: distribute_tensor(torch.cat((x, x), 2), context_mesh(), [Shard(2)]),
        "key must have the 13 tokens of the layout, got 26",
    ),
    "other ranks": (
        lambda x: distribute_tensor(x, context_mesh(1), [Shard(2)]),
        "key must be a DTensor over the handle's ranks in their order, [0, 1, 2, 3], got [1, 2, 3, 0]",
    ),
    "another layout": (
        lambda x: distribute_tensor(x, context_mesh(), [Shard(2)]),
        "must hold on each rank the tokens that the layout gives it",
    ),
}  # fmt: skip


def _refuse(name: str) -> None:
    """Rank 1 alone is wrong, every rank is told, and a right call after it is right."""
    rank, (make, words) = dist.get_rank(), REFUSED[name]
    layout = Layout.zigzag(TOKENS, WORLD) if name == "another layout" else dtensor_layout(TOKENS, WORLD)
    q, k, v = (layout.shard(x, rank, 2) for x in inputs()[:3])
    key = make(inputs()[1])
    with pytest.raises(ValueError, match=re.escape(words)):
        planned(layout)(q, key if rank == 1 else k, v)
    _run_dtensors(use_local_output=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_dtensor_on_one_rank_is_refused_on_every_rank(ranks: Ranks, name: str) -> None:
    ranks(WORLD).run(_refuse, name)


def _refuse_plans() -> None:
    mesh = context_mesh()
    context = ContextParallel(Layout.zigzag(TOKENS, WORLD), mesh)
    with pytest.raises(ValueError, match="device_mesh must have the handle's ranks"):
        parallelize_module(Inner(), context_mesh(1), {"attention": RingParallel(context)})
    with pytest.raises(ValueError, match="module must take the keyword context"):
        parallelize_module(nn.Linear(2, 2), mesh, RingParallel(context))
    with pytest.raises(ValueError, match="use_local_output=False needs"):
        parallelize_module(Inner(), mesh, {"attention": RingParallel(context, use_local_output=False)})
    layout = Layout.contiguous(TOKENS, WORLD)
    q, k, v = (layout.shard(x, dist.get_rank(), 2) for x in inputs()[:3])
    with pytest.raises(ValueError, match="context must be left out"):
        planned(layout)(q, k, v, context=context)


def test_plans_and_contexts_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    ranks(WORLD).run(_refuse_plans)
