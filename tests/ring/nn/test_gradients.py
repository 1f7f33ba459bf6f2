"""Gradients averaged as DDP averages them, and clipped by the norm of all of them, plain and sharded ones together."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ring.nn import average_gradients, clip_grad_norm, gradients, loss_ranks
from ring.nn.gradients import BUCKET
from tests.support.nn_ranks import OVERS, drawn, far, grad_of, mesh_of, over_of, said
from tests.support.ranks import Ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((3, 4), (5,), (), (0, 2), (7, 2))


def with_grad(grad: Tensor) -> nn.Parameter:
    x = nn.Parameter(torch.zeros_like(grad))
    x.grad = grad
    return x


def _averaged(name: str, bucket: int) -> None:
    """Every type and shape; some gradients are missing, on some ranks or on all; some lie in another order. Of fp16 the
    sum of two is infinite, and the average is not."""
    over, members = over_of(name)
    if dist.get_rank() not in members:
        return
    loss_ranks.left()  # these gradients are of no backward: a test before may have left a loss over other ranks
    parameters, before, wanted, spaces = [], [], [], []
    for number, (dtype, shape) in enumerate(product(DTYPES, SHAPES)):
        size, middle = (500, 40000) if dtype == torch.float16 else (1, 0)
        everyone = [(middle + size * drawn(100 * rank + number, *shape)).to(dtype) for rank in members]
        if len(shape) == 2:
            everyone = [x.t().contiguous().t() for x in everyone]
        has = [number % 7 != 6 and (number + rank) % 3 != 0 for rank in members]
        at = members.index(dist.get_rank())
        parameters.append(with_grad(everyone[at]))
        parameters[-1].grad = everyone[at] if has[at] else None
        before.append(parameters[-1].grad)
        total = sum((x.double() for x, there in zip(everyone, has, strict=True) if there), torch.zeros(shape).double())
        wanted.append(total / len(members) if any(has) else None)
        exactness = 5 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        spaces.append((middle or 4) * (exactness + torch.finfo(dtype).eps))
    with patch.object(gradients, "BUCKET", bucket):
        average_gradients(iter([*parameters, parameters[0]]), over)
    for x, old, exact, space in zip(parameters, before, wanted, spaces, strict=True):
        assert x.grad is old or old is None, "written into the gradient that was there"
        assert x.grad is None or (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
        assert far([None if x.grad is None else x.grad.double()], [exact]) < space
    average_gradients([], over)


@pytest.mark.ranks
@pytest.mark.parametrize("bucket", [24, BUCKET])
@pytest.mark.parametrize("name", OVERS)
def test_the_average(ranks: Ranks, name: str, bucket: int) -> None:
    ranks(4).run(_averaged, name, bucket)


PLACEMENTS: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "one dimension": (("context", (Shard(0),)), ("context", (Shard(1),)), ("context", (Replicate(),))),
    "two dimensions": (
        ("2x2", (Shard(0), Shard(1))), ("2x2", (Replicate(), Shard(0))), ("2x2", (Shard(1), Replicate())),
        ("2x2", (Shard(0), Shard(0))),
    ),
    "several meshes": (
        ("2x2", (Shard(0), Replicate())), ("2x2 apart", (Shard(0), Replicate())), ("context", (Shard(0),)),
        ("2x2 apart", (Replicate(), Replicate())), ("2x2 apart", (Shard(1), Shard(1))),
    ),
    "plain alone": (),
}  # fmt: skip


def _clipped(kind: str, max_norm: float) -> str:
    """Compare with torch's clipping of whole gradients; return the norm in full."""
    whole, mine = [], []
    for number, (name, placements) in enumerate((*PLACEMENTS[kind], ("", ()), ("", ()))):
        grad = drawn(number, 6, 5)
        whole.append(with_grad(grad))
        mine.append(with_grad(grad.clone()))
        if name:
            mesh = mesh_of("1x4")["context"] if name == "context" else mesh_of(name)
            mine[-1] = nn.Parameter(distribute_tensor(torch.zeros(6, 5).double(), mesh, placements))
            mine[-1].grad = distribute_tensor(grad.clone(), mesh, placements)
    found = clip_grad_norm([*mine, nn.Parameter(torch.zeros(3)), mine[0]], max_norm)  # without gradient; listed twice
    wanted = torch.nn.utils.clip_grad_norm_(whole, max_norm)
    grads = [x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in mine]
    assert far([found, *grads], [wanted, *(x.grad for x in whole)]) < 1e-13
    assert found.dtype is torch.float64 and found.device.type == "cpu"
    return found.numpy().tobytes().hex()


@pytest.mark.ranks
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_the_norm_and_the_clipped_gradients(ranks: Ranks, kind: str, max_norm: float) -> None:
    assert len(set(ranks(4).run(_clipped, kind, max_norm))) == 1


def _not_averaged(size: float, other: float) -> str:
    """Clip before the average: each rank would divide by a norm of its own. other: the size on rank 1."""
    grad = torch.full((8,), other if dist.get_rank() == 1 else size, dtype=torch.float64)
    x = with_grad(grad.clone())
    answer = said(lambda: clip_grad_norm(x, 1.0))
    assert answer == "fine" or torch.equal(grad_of(x), grad)
    x.grad = torch.full((8,), 1.0 + dist.get_rank()).double()
    average_gradients(x)
    clip_grad_norm(x, 1.0)
    return answer


ROUNDING = 2.0**-52  # ranks may sum eight squares in another order, which makes eight roundings


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "other"), [(1.0, 2.0), (1e-9, 2e-9), (1e100, 2e100), (3.0, torch.inf), (1.0, 1.0 + 6 * ROUNDING)]
)
def test_gradients_that_were_not_averaged_are_refused(ranks: Ranks, size: float, other: float) -> None:
    (answer,) = set(ranks(4).run(_not_averaged, size, other))
    assert "gradients of plain parameters must be equal on all ranks: average them first" in answer


def _sharded_over_data_alone() -> str:
    mesh, layer = mesh_of("2x2"), nn.Linear(4, 4)
    assert mesh.mesh_dim_names is not None
    fully_shard(layer, mesh=mesh[mesh.mesh_dim_names[0]])
    layer(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    return said(lambda: clip_grad_norm(layer.parameters(), 1.0, mesh))


@pytest.mark.ranks
def test_shards_averaged_over_data_alone_are_refused(ranks: Ranks) -> None:
    (answer,) = set(ranks(4).run(_sharded_over_data_alone))
    assert "gradients of DTensors must be equal on all ranks: shard the model over all of these ranks" in answer


@pytest.mark.ranks
def test_squares_may_be_summed_in_another_order(ranks: Ranks) -> None:
    assert set(ranks(4).run(_not_averaged, 1.0, 1.0 + 3 * ROUNDING)) == {"fine"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_computed_in_fp64(dtype: torch.dtype) -> None:
    """Squares of numbers around 300 are beyond fp16."""
    grads = [(300 + drawn(0, 40, 3)).to(dtype), drawn(1, 5).to(dtype)]
    parameters = [with_grad(grad.clone()) for grad in grads]
    average_gradients(parameters)
    found = clip_grad_norm(parameters, 10.0)
    exact = torch.cat([grad.double().flatten() for grad in grads]).norm()
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0.0)
    for x, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(
            grad_of(x).double(), grad.double() * 10.0 / exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-7
        )


def _of_other_models(dtype: torch.dtype, by: float) -> str:
    parameters = [nn.Parameter(torch.full(shape, 1.5, dtype=dtype)) for shape in ((3, 2), (), (4,))]
    if dist.get_rank() == 3:
        parameters[2].data[3] += by
    return said(lambda: average_gradients(parameters))


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_that_are_none_are_refused(ranks: Ranks, dtype: torch.dtype) -> None:
    assert set(ranks(4).run(_of_other_models, dtype, 0.0)) == {"fine"}
    for by in (torch.finfo(dtype).eps, torch.nan):
        (answer,) = set(ranks(4).run(_of_other_models, dtype, by))
        assert "parameters must have the same values on every rank, got others in number 2 on rank 3" in answer


def test_clipping_without_gradients_returns_zero() -> None:
    assert clip_grad_norm([], 1.0) == clip_grad_norm(nn.Parameter(torch.zeros(3)), 1.0) == 0.0


def test_a_wrapper_compares_the_ranks_of_one_backward_alone() -> None:
    numbers, x = list[int](), torch.zeros(1, requires_grad=True)

    def hook(_: Tensor) -> None:
        numbers.append(torch._C._current_graph_task_id())
        loss_ranks.note(frozenset({0, 1}))

    x.register_hook(hook)
    x.sum().backward()
    assert loss_ranks.noted(numbers[0]) == [{0, 1}] and loss_ranks.left() == []
    x.sum().backward()
    assert loss_ranks.left() == [{0, 1}] and loss_ranks.left() == []
    x.sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()
    assert loss_ranks.left() == []  # gradients may be of the latest backward, which had no such loss
