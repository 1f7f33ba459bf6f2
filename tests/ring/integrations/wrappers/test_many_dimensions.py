"""Steps over meshes of three and four dimensions equal those of one process; losses over other ranks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ring.integrations.wrappers import ddp, fsdp
from ring.nn import ContextParallel, LongNetBlock, average_gradients, clip_grad_norm, cross_entropy, shard_batch
from tests.support.framework_example import Example, Result, SmallModel, assert_near, dense, mesh_of, trained
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _train(
    example: Example,
    dims: Any,
    names: tuple[str, ...],
    wrapper: str,
    options: dict[str, Any],
    loss_over: tuple[str, ...],
) -> Result:
    """names: the last two are the context and the tensors; those before have different sequences."""
    mesh, model = mesh_of(dims, names), SmallModel()
    own, coordinate = mesh[names[:-1]], mesh.get_coordinate()
    assert coordinate is not None
    data = 0
    for size, at in zip(mesh.shape[:-2], coordinate[:-2], strict=True):
        data = data * size + at
    if mesh.size(-1) > 1:
        for layer in model.layers:
            whole = Replicate()
            plan = {"fc1": ColwiseParallel(output_layouts=whole), "fc2": RowwiseParallel(input_layouts=whole)}
            parallelize_module(layer, mesh[names[-1]], plan)
            assert isinstance(layer.get_parameter("fc1.weight"), DTensor)
    wrapped: Any = (
        ddp.wrap(model, own, **options) if wrapper == "ddp" else fsdp.shard(model, own, LongNetBlock, **options)
    )
    place = mesh[loss_over], ContextParallel(example.arranged(), mesh[names[-2]]), data
    most = example.clip or 1e300
    return trained(example, model, wrapped, clip=lambda: clip_grad_norm(model.parameters(), most, mesh), place=place)


LEVELS, TENSOR = ("replicate", "shard", "cp", "tp"), ("dp", "context", "tensor")
TWO = Example("together", "striped", clip=0.1)  # two data ranks, two of context
ONE = Example("short", clip=0.1)  # two of context


@pytest.mark.parametrize(
    "example, dims, names, wrapper, options, loss_over",
    [
        (TWO, (((((0,), (1,)),), (((2,), (3,)),))), LEVELS, "ddp", {}, LEVELS[:3]),
        (TWO, (((((0,), (1,)),), (((2,), (3,)),))), LEVELS, "fsdp", {"replicate": "replicate"}, LEVELS[:3]),
        (TWO, ((((0,), (2,)), ((1,), (3,))),), LEVELS, "fsdp", {}, LEVELS),
        (TWO, ((((0,), (2,)), ((1,), (3,))),), LEVELS, "fsdp", {"replicate": ("shard",)}, LEVELS[:3]),
        (ONE, (((0, 1), (2, 3)),), TENSOR, "fsdp", {"same_tokens": "tensor"}, ("dp", "context")),
        (ONE, (((0, 2), (1, 3)),), TENSOR, "fsdp", {"same_tokens": "tensor"}, TENSOR),
        (ONE, (((0, 1), (2, 3)),), TENSOR, "fsdp", {"same_tokens": "tensor", "replicate": "context"}, TENSOR[:2]),
    ],
)
def test_meshes_of_many_dimensions_train_as_one_process(
    ranks: Ranks, example: Example, dims: Any, names: Any, wrapper: str, options: dict[str, Any], loss_over: Any
) -> None:
    assert_near(ranks(4).run(_train, example, dims, names, wrapper, options, loss_over), dense(example))


def _refuse(case: str) -> str:
    """Averaging over two of four ranks, which a mesh of its own does not show."""
    mesh, rank = mesh_of(((0, 1), (2, 3))), dist.get_rank()
    part = mesh_of(((0, 1), (2, 3)))["context" if case != "context" else "data"]
    alone = DeviceMesh.from_group(part.get_group(), "cpu", mesh_dim_names=("mine",))
    context = ContextParallel(TWO.arranged(), mesh["context"])
    model: Any = SmallModel()
    wrapped: Any = model
    if "average" not in case:
        wrapped = fsdp.shard(model, alone, LongNetBlock) if case == "fsdp" else ddp.wrap(model, alone)
    (tokens, labels), *_ = TWO.whole(0)
    batch = shard_batch(context, tokens[rank // 2 * 2 :][:2], labels[rank // 2 * 2 :][:2])
    assert batch.labels is not None
    local, over = batch.labels, {"other": mesh["data"], "average over more": mesh["context"]}.get(case, mesh)

    def step() -> None:
        cross_entropy(wrapped(batch.tokens, batch.context), local, over).backward()
        if "average" in case:
            average_gradients(model.parameters(), alone if case == "average" else mesh)

    return said(step)


LOSSES = "losses must be over the ranks over which the wrapper averages gradients, [0, 1], got one over "
REFUSED = {
    "ddp": f"{LOSSES}[0, 1, 2, 3]",
    "fsdp": f"{LOSSES}[0, 1, 2, 3]",
    "other": f"{LOSSES}[0, 2]",
    "average": "over must have the ranks of the loss, [0, 1, 2, 3], got [0, 1]: give",
    "average over more": "over must have the ranks of the loss, [0, 1], got [0, 1, 2, 3]: give",
    "context": "mesh of the wrapper must have all ranks of the context, [0, 1], got [0, 2]",
}


@pytest.mark.parametrize("case", REFUSED)
def test_averages_over_a_part_of_the_ranks_are_refused(ranks: Ranks, case: str) -> None:
    answers = ranks(4).run(_refuse, case)
    assert REFUSED[case] in answers[0]
    assert all(answer.startswith("ValueError: ") for answer in answers)
