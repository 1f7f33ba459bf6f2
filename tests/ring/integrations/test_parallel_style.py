"""`RingParallel` in a plan of `parallelize_module`: shards, DTensors, and which of those are refused."""

from __future__ import annotations

import re
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
from ring.integrations.parallel_style import RingParallel, dtensor_layout
from ring.nn import ContextParallel, RingAttention
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


def sharded(x: Tensor) -> DTensor:
    """Cut as torch cuts."""
    return distribute_tensor(x, context_mesh(), [Shard(2)])


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _run(given: str, returned: str) -> None:
    """given, returned: "shards" or "DTensors"."""
    layout = Layout.zigzag(TOKENS, WORLD) if given == "shards" else dtensor_layout(TOKENS, WORLD)

    def cut(x: Tensor) -> Tensor:
        return layout.shard(x, dist.get_rank(), 2) if given == "shards" else sharded(x)

    *leaves, dout = (cut(x).requires_grad_() for x in inputs())
    out = planned(layout, returned == "shards")(*leaves)
    assert isinstance(out, DTensor) is (returned == "DTensors")
    grads = torch.autograd.grad(out, leaves, local(dout) if returned == "shards" else dout)
    q, k, v, whole_dout = (x.requires_grad_() for x in inputs())
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for x, y in zip([out, *grads], [wanted.detach(), *torch.autograd.grad(wanted, (q, k, v), whole_dout)], strict=True):
        torch.testing.assert_close(local(x), local(cut(y)), rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("given", "returned"), [("shards", "shards"), ("DTensors", "shards"), ("DTensors", "DTensors")]
)
def test_output_and_gradients(ranks: Ranks, given: str, returned: str) -> None:
    ranks(WORLD).run(_run, given, returned)


@pytest.mark.parametrize(
    ("n", "p", "counts"), [(13, 4, (4, 4, 4, 1)), (9, 4, (3, 3, 3, 0)), (5, 4, (2, 2, 1, 0)), (8, 2, (4, 4))]
)
def test_the_layout_of_a_dtensor_is_cut_as_torch_cuts(n: int, p: int, counts: tuple[int, ...]) -> None:
    layout = dtensor_layout(n, p)
    assert tuple(layout.counts) == counts == tuple(len(x) for x in torch.arange(n).chunk(p)) + (0,) * counts.count(0)
    assert torch.cat([torch.as_tensor(layout.positions(rank)) for rank in range(p)]).tolist() == list(range(n))


def _refuse() -> None:
    """Rank 1 alone is wrong, every rank is told, and a right call after it is right."""
    mesh, rank, whole = context_mesh(), dist.get_rank(), inputs()
    cut, zigzag = dtensor_layout(TOKENS, WORLD), Layout.zigzag(TOKENS, WORLD)
    for key, layout, words in (
        (distribute_tensor(whole[1], mesh, [Replicate()]), cut, "its tokens, Shard(2), got (Replicate(),)"),
        (distribute_tensor(whole[1], mesh, [Shard(1)]), cut, "key must be sharded along its tokens"),
        (sharded(torch.cat((whole[1], whole[1]), 2)), cut, "key must have the 13 tokens of the layout, got 26"),
        (
            distribute_tensor(whole[1], context_mesh(1), [Shard(2)]), cut,
            "key must be a DTensor over the handle's ranks in their order, [0, 1, 2, 3], got [1, 2, 3, 0]",
        ),
        (sharded(whole[1]), zigzag, "must hold the tokens of the layout on each rank"),
    ):  # fmt: skip
        q, k, v = (layout.shard(x, rank, 2) for x in whole[:3])
        with pytest.raises(ValueError, match=re.escape(words)):
            planned(layout)(q, key if rank == 1 else k, v)
        _run("DTensors", "shards")
    context = ContextParallel(Layout.zigzag(TOKENS, WORLD), mesh)
    with pytest.raises(ValueError, match="device_mesh must have the handle's ranks"):
        parallelize_module(Inner(), context_mesh(1), {"attention": RingParallel(context)})
    with pytest.raises(ValueError, match="module must take the keyword context"):
        parallelize_module(nn.Linear(2, 2), mesh, RingParallel(context))
    with pytest.raises(ValueError, match="use_local_output=False needs"):
        parallelize_module(Inner(), mesh, {"attention": RingParallel(context, use_local_output=False)})
    with pytest.raises(ValueError, match="context must be left out"):
        planned(layout)(q, k, v, context=context)
    with pytest.raises(TypeError, match="rank 1: got an unexpected keyword argument 'mask'"):
        planned(layout)(q, k, v, **{"mask": None} if rank == 1 else {})


def test_refuses_wrong_dtensors_and_misfit_plans(ranks: Ranks) -> None:
    ranks(WORLD).run(_refuse)
