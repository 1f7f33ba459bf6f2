"""What ranks of a pool are asked to do with gradients, and with the ranks of meshes that are not the whole world."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ring import Layout
from ring.nn import ContextParallel, average_gradients, clip_grad_norm
from ring.nn.batch_ranks import BatchRanks
from tests.support.nn_ranks import apart, drawn, far, mesh_of, said

SHAPES = ((3, 4), (5,), (7, 2))


def _parameters(dtype: torch.dtype, rank: int, missing: Sequence[int] = ()) -> list[nn.Parameter]:
    """With gradients of this rank's own; those numbered in `missing` have none."""
    found = []
    for number, shape in enumerate(SHAPES):
        x = nn.Parameter(torch.zeros(shape, dtype=dtype))
        x.grad = None if number in missing else drawn(10 * rank + number, *shape).to(dtype)
        found.append(x)
    return found


MISSING = ((0,), (0, 1), (0,), (0, 1, 2))  # on each rank: number 0 is missing on all


def averaged(dtype: torch.dtype, mesh: str | None) -> float:
    """The error, in units of the dtype's precision; that the ranks have the same bits is checked here."""
    rank = dist.get_rank()
    mine = _parameters(dtype, rank, MISSING[rank])
    average_gradients(mine, None if mesh is None else mesh_of(mesh))
    everyone = [_parameters(dtype, other, MISSING[other]) for other in range(4)]
    wanted = []
    for number, x in enumerate(mine):
        given = [theirs[number].grad for theirs in everyone]
        total = sum((grad.double() for grad in given if grad is not None), torch.zeros(SHAPES[number]).double())
        wanted.append(None if all(grad is None for grad in given) else total / 4)
        assert x.grad is None or x.grad.dtype == dtype
    found = [None if x.grad is None else x.grad.double() for x in mine]
    assert _same_bits(found)
    return far(found, wanted) / torch.finfo(dtype).eps


def _same_bits(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all ranks have the same."""
    joined = torch.cat([x.flatten() for x in tensors if x is not None])
    everyone = [torch.empty_like(joined) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, joined)
    return all(torch.equal(one, joined) for one in everyone)


def like_ddp() -> float:
    """A model with a layer that is not used: its gradients against those under DDP."""

    def made() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(10, 7), nn.Linear(10, 3), nn.Linear(2, 2)]).double()

    def backward(layers: nn.ModuleList) -> list[Tensor | None]:
        x = drawn(dist.get_rank(), 2, 10)
        (layers[0](x).square().sum() + layers[1](x).square().sum()).backward()
        return [y.grad for y in layers.parameters()]

    plain, wrapped = made(), made()
    backward(plain)
    average_gradients(plain.parameters())

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = wrapped

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x).square().sum() + self.layers[1](x).square().sum()

    model = DistributedDataParallel(Run(), find_unused_parameters=True)  # kept: it goes by a weak reference to itself
    model(drawn(dist.get_rank(), 2, 10)).backward()
    found, wanted = [x.grad for x in plain.parameters()], [x.grad for x in wrapped.parameters()]
    assert found[-1] is None
    return far(found[:-2], wanted[:-2])  # DDP has zeros, or none, for what no rank used


# --- the norm ---------------------------------------------------------------------------------------------------------

PLACEMENTS = {
    "one dimension": ("1x4", ((Shard(0),), (Shard(1),), (Replicate(),))),
    "two dimensions": (
        "2x2", ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()), (Shard(0), Shard(0)))
    ),
    "apart": ("2x2 apart", ((Shard(0), Replicate()), (Replicate(), Replicate()), (Shard(1), Shard(1)))),
}  # fmt: skip


def clipped(kind: str, max_norm: float, plain: int) -> tuple[float, float, str]:
    """(error of the norm, of the gradients, the norm in full) against torch's clipping of whole gradients."""
    name, placements = PLACEMENTS[kind]
    mesh = mesh_of(name)["context"] if name == "1x4" else mesh_of(name)
    whole = [nn.Parameter(torch.zeros(6, 5, dtype=torch.float64)) for _ in range(len(placements) + plain)]
    for number, x in enumerate(whole):
        x.grad = drawn(number, *x.shape)
    mine: list[nn.Parameter] = []
    for number, x in enumerate(whole):
        assert x.grad is not None
        if number < len(placements):
            own = nn.Parameter(distribute_tensor(x.detach(), mesh, placements[number]))
            own.grad = distribute_tensor(x.grad.clone(), mesh, placements[number])
        else:
            own = nn.Parameter(x.detach().clone())
            own.grad = x.grad.clone()
        mine.append(own)
    without = nn.Parameter(torch.zeros(3))
    found = clip_grad_norm([*mine, without], max_norm)
    wanted = torch.nn.utils.clip_grad_norm_(whole, max_norm)
    grads = [x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in mine]
    return apart(found, wanted), far(grads, [x.grad for x in whole]), found.numpy().tobytes().hex()


def local_gradients_are_noticed() -> str:
    """Clipping before the average: each rank would divide by a norm of its own."""
    mine = _parameters(torch.float64, dist.get_rank())
    answer = said(lambda: clip_grad_norm(mine, 1.0))
    assert far([x.grad for x in mine], [x.grad for x in _parameters(torch.float64, dist.get_rank())]) == 0.0
    average_gradients(mine)
    clip_grad_norm(mine, 1.0)
    return answer


def infinite_on_one_rank() -> str:
    mine = _parameters(torch.float32, 0)
    if dist.get_rank() == 1:
        mine[0].grad = torch.full(SHAPES[0], torch.inf)
    return said(lambda: clip_grad_norm(mine, 1.0))


def refused_dtensors() -> list[str]:
    mesh = mesh_of("1x4")["context"]
    sharded = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Shard(0)]))
    partial = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(8), mesh, [Partial()])
    return [said(lambda: average_gradients([sharded])), said(lambda: clip_grad_norm([partial], 1.0))]


# --- ranks ------------------------------------------------------------------------------------------------------------


@cache
def _part_of_the_world() -> DeviceMesh:
    """Four of five ranks, not in their order."""
    return DeviceMesh("cpu", torch.tensor([[4, 1], [0, 3]]), mesh_dim_names=("data", "context"))


def among_some_ranks() -> object:
    """On the four: (own number, all numbers, sum, what was gathered as bytes). On the fifth: what it is told.

    The handle of another mesh of the four is made, or refused, as well.
    """
    mesh = _part_of_the_world()
    if dist.get_rank() == 2:
        line = DeviceMesh("cpu", torch.tensor([0, 1, 3, 4]), mesh_dim_names=("context",))
        return said(lambda: BatchRanks(mesh)), said(lambda: ContextParallel(Layout.contiguous(4, 4), line))
    ranks = BatchRanks(mesh)
    line = DeviceMesh("cpu", torch.tensor([0, 1, 3, 4]), mesh_dim_names=("context",))
    ContextParallel(Layout.contiguous(4, 4), line)
    x = drawn(ranks.rank, 3)
    total = x.clone()
    ranks.add(total)
    everyone = ranks.gather(x)
    texts = [text.decode() for text in ranks.all_gather(f"rank {ranks.rank}".encode())]
    numbers = ranks.gather(torch.tensor(dist.get_rank())).tolist()
    error = far([total], [everyone.sum(0)])
    return ranks.rank, ranks.world_size, numbers, texts, error, total.tolist()


def some_ranks_agree(wrong: int | None, how: str) -> str:
    """Rank `wrong` of the mesh has an error, or another signature."""
    mesh = _part_of_the_world()
    if dist.get_rank() == 2:
        return "not asked"
    ranks = BatchRanks(mesh)
    mine = ranks.rank == wrong
    error = ValueError(f"labels are wrong on {ranks.rank}") if mine and how == "error" else None
    answer = said(lambda: ranks.agree("work", {"size": 2 if mine and how == "signature" else 1}, error))
    ranks.agree("work", {}, None)
    return answer


def doing_something_else() -> str:
    mesh = _part_of_the_world()
    if dist.get_rank() == 2:
        return "not asked"
    ranks = BatchRanks(mesh)
    return said(lambda: ranks.agree("cross_entropy" if ranks.rank else "count_labels", {"x": ranks.rank}, None))
