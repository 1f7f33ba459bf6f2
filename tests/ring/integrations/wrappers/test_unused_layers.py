"""Layers and parameters that only some ranks use in a step: right as in one process, or refused on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

from ring.integrations.wrappers import ddp, fsdp
from ring.nn import average_gradients, clip_grad_norm
from tests.support.framework_example import EXACT, mesh_of, whole
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
WIDTH = 4
Plan = tuple[tuple[str, ...], ...]  # by rank, the branches that it runs, in this order


class Branch(nn.Module):
    """x -> x + a small network of x."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Inner(), nn.Parameter(torch.full((WIDTH,), 0.5))
        self.spare = nn.Parameter(torch.full((WIDTH,), 0.25))  # weight decay, too, passes over it
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.75), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.frozen * self.inner(x)


class Inner(nn.Module):
    """A layer within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class Trunk(nn.Module):
    """A layer that all ranks run, with branches that some leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.linear = nn.ModuleDict({name: Branch() for name in "abc"}), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        x = self.linear(x)
        for name in names:
            x = self.branches[name](x)
        return x


@dataclass
class Output:
    """No container that torch's pytrees know."""

    y: Tensor


class Forked(nn.Module):
    """Three layers of branches between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.first, self.second, self.head = Trunk(), Trunk(), nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor, names: tuple[str, ...]) -> Output:
        return Output(self.head(self.second(self.first(x, names), names)))


def rows(rank: int, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(rank + 1, WIDTH, dtype=torch.float64, generator=draw)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.3)


def alone(steps: list[list[Plan]], world: int) -> dict[str, Any]:
    """Train in one process: the mean over ranks of the losses of all ranks and micro-batches."""
    model, norms = Forked(), []
    optimizer = optimizer_for(model)
    for number, micro_batches in enumerate(steps):
        for plan in micro_batches:
            for rank in range(world):
                (model(rows(rank, number), plan[rank]).y.square().sum() / world).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **{name: x.detach() for name, x in model.named_parameters()}}


def trained(wrapper: str, steps: list[list[Plan]], world: int, options: dict[str, Any]) -> dict[str, Any]:
    mesh, rank, inner = mesh_of(tuple(range(world)), ("context",)), dist.get_rank(), Forked()
    model: Any = inner
    if wrapper == "fsdp from meta":
        model = fsdp.shard(Forked().to("meta"), mesh, Trunk)
        model.to_empty(device="cpu")
        for name, x in model.named_parameters():
            x.data.copy_(distribute_tensor(inner.get_parameter(name).detach(), mesh, x.placements))
        inner = model
    elif wrapper == "fsdp":
        model = fsdp.shard(inner, mesh, **{"layers": Trunk} | options)
    elif wrapper == "ddp":
        model = ddp.wrap(inner, mesh, **options)
    optimizer, norms = optimizer_for(inner), []
    for number, micro_batches in enumerate(steps):
        for at, plan in enumerate(micro_batches, 1):
            with accumulating(model, last=at == len(micro_batches)):
                model(rows(rank, number), plan[rank]).y.square().sum().backward()
        if wrapper == "none":
            average_gradients(inner.parameters(), mesh)
        norms.append(clip_grad_norm(inner.parameters(), 0.5, mesh))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **{name: whole(x) for name, x in inner.named_parameters()}}


def accumulating(model: Any, last: bool) -> AbstractContextManager[object]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) and not last else nullcontext()


ALL, NONE, SOME = ("a", "b", "c"), (), ("a", "c")
SAME: list[list[list[Plan]]] = [  # in each step, and in each micro-batch of one, by rank
    [[(ALL, ALL)], [(SOME, SOME)], [(NONE, NONE)], [(ALL, ALL)]],
    [[(NONE, NONE)], [(ALL, ALL)], [(("a",), ("a",))], [(("c", "a"), ("c", "a"))]],
    [[(("a", "a", "b"), ("a", "a", "b"))], [(("a", "b"), ("a", "b"))]],
    [[(ALL, ALL), (SOME, SOME)], [(NONE, NONE), (SOME, SOME)]],
]


@pytest.mark.parametrize("steps", SAME)
@pytest.mark.parametrize(
    "layers, reshard", [((Trunk, Branch), True), ((Trunk, Branch, Inner), False), (Inner, True), (Inner, False)]
)
def test_units_that_all_ranks_leave_out(ranks: Ranks, steps: list[list[Plan]], layers: Any, reshard: bool) -> None:
    exact = alone(steps, 2)
    options = {"layers": layers, "reshard_after_forward": reshard}
    for found in ranks(2).run(trained, "fsdp", steps, 2, options):
        torch.testing.assert_close(found, exact, rtol=0.0, atol=EXACT)


def _refused_by_old_torch() -> str:
    reset = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        model: Any = fsdp.shard(Forked(), mesh_of((0, 1), ("context",)), (Trunk, Branch))
        return said(lambda: model(rows(0, 0), SOME))
    finally:
        FSDPModule.reset_iter_state = reset  # type: ignore[method-assign]


def test_units_left_out_under_an_older_torch_are_refused(ranks: Ranks) -> None:
    for words in ranks(2).run(_refused_by_old_torch):
        assert "got none of first.branches.b, second.branches.b: use torch 2.13" in words, words


def _refused(warm: list[Plan], plan: Plan, layers: Any, world: int) -> str:
    """Run one plan after others; the group, and the model, can be used afterwards."""
    mesh, rank = mesh_of(tuple(range(world)), ("context",)), dist.get_rank()
    model: Any = fsdp.shard(Forked(), mesh, layers)
    for number, before in enumerate(warm):
        model(rows(rank, number), before[rank]).y.square().sum().backward()
    model.zero_grad()
    answer = said(lambda: model(rows(rank, 7), plan[rank]))
    model(rows(rank, 0), ALL).y.square().sum().backward()
    inner = Forked()
    for other in range(world):
        (inner(rows(other, 0), ALL).y.square().sum() / world).backward()
    grads = {name: whole(x.grad) for name, x in model.named_parameters() if x.grad is not None}
    exact = {name: x.grad for name, x in inner.named_parameters() if x.grad is not None}
    torch.testing.assert_close(grads, exact, rtol=0.0, atol=EXACT)
    return answer


SOMEWHERE: list[list[list[Plan]]] = [
    [[(ALL, SOME)], [(NONE, ("b",))], [(NONE, NONE)], [(("c", "a"), ("a", "a", "b"))]],
    [[(("b",), ("c",)), (("a",), NONE)], [(NONE, NONE), (SOME, ("a",))]],
]


@pytest.mark.parametrize("steps", SOMEWHERE)
@pytest.mark.parametrize(
    "wrapper, options",
    [
        ("fsdp", {}),
        ("fsdp", {"reshard_after_forward": False}),
        ("fsdp", {"policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
        ("fsdp from meta", {}),
        ("ddp", {}),
        ("ddp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
        ("ddp", {"find_unused_parameters": True}),
        ("none", {}),
    ],
)
def test_parameters_that_some_ranks_leave_out(
    ranks: Ranks, wrapper: str, options: dict[str, Any], steps: list[list[Plan]]
) -> None:
    exact = alone(steps, 2)
    for found in ranks(2).run(trained, wrapper, steps, 2, options):
        torch.testing.assert_close(found, exact, rtol=0.0, atol=EXACT)


FIRST, UNIT = "first.branches", (Trunk, Branch)
REFUSED: list[tuple[list[Plan], Plan, Any, str]] = [
    ([], (ALL, SOME), UNIT, f"after {FIRST}.a comes {FIRST}.b on ranks 0; {FIRST}.c on ranks 1. "),
    ([], (NONE, ("a",)), UNIT, f"after first comes second on ranks 0; {FIRST}.a on ranks 1. "),
    ([(ALL, ALL)], (ALL, SOME), UNIT, f"after {FIRST}.a comes {FIRST}.b on ranks 0; {FIRST}.c on ranks 1. "),
    ([(ALL, ALL)], (("a", "b"), ALL), UNIT, f"after {FIRST}.b comes second on ranks 0; {FIRST}.c on ranks 1. "),
    ([(ALL, ALL)], (NONE, NONE), UNIT, "fine"),
    ([(NONE, NONE)], (("b",), NONE), UNIT, f"after first comes {FIRST}.b on ranks 0; second on ranks 1. "),
    ([(ALL, ALL)], (("a", "a"), ("a",)), UNIT, f"after {FIRST}.a comes {FIRST}.a on ranks 0; second on ranks 1. "),
    ([(ALL, ALL)], (("a", "b"), ("b", "a")), UNIT, f"after first comes {FIRST}.a on ranks 0; {FIRST}.b on ranks 1. "),
    ([(("a",), ("a",))], (("b", "a"), ("a", "b")), UNIT, f"after first comes {FIRST}.b on ranks 0; {FIRST}.a on "),
    ([(("a", "a"), ("a", "a"))], (("a", "a"), ("a",)), UNIT, f"after {FIRST}.a comes {FIRST}.a on ranks 0; second"),
    ([], (ALL, SOME), Inner, f"after {FIRST}.a.inner comes {FIRST}.b.inner on ranks 0; {FIRST}.c.inner on ranks 1. "),
    ([(ALL, ALL)], (("a", "b"), ALL), Inner, f"after {FIRST}.b.inner comes second.branches.a.inner on ranks 0; "),
]


@pytest.mark.parametrize("warm, plan, layers, words", REFUSED)
def test_units_that_some_ranks_leave_out(ranks: Ranks, warm: list[Plan], plan: Plan, layers: Any, words: str) -> None:
    (answer,) = set(ranks(2).run(_refused, warm, plan, layers, 2))
    assert words in answer


def test_units_of_four_ranks(ranks: Ranks) -> None:
    (answer,) = set(ranks(4).run(_refused, [], (ALL, SOME, ALL, NONE), UNIT, 4))
    assert f"after first comes {FIRST}.a on ranks 0, 1, 2; second on ranks 3. " in answer
