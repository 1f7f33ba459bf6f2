"""Meshes over which gradients are averaged, and over which FSDP replicates: their ranks, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring.nn.frameworks.mesh import averaging_mesh, replicating_mesh
from tests.support.framework_example import mesh_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

DATA_CONTEXT, CONTEXT = ("data", "context"), ("context",)


def _average(ranks: tuple[Any, ...], names: tuple[str, ...]) -> None:
    averaged = averaging_mesh(mesh_of(ranks, names))
    assert (averaged.ndim, averaged.mesh.tolist()) == (1, [0, 1, 2, 3])
    assert averaged.get_local_rank() == dist.get_rank()
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=averaged.get_group())
    assert total == 15.0


@pytest.mark.parametrize(
    ("dims", "names"),
    [
        (((0, 1), (2, 3)), DATA_CONTEXT),
        (((0, 2), (1, 3)), DATA_CONTEXT),
        (((3, 2), (1, 0)), DATA_CONTEXT),
        (((0, 1), (2, 3)), ("context", "data")),
        ((0, 1, 2, 3), CONTEXT),
        ((3, 2, 1, 0), CONTEXT),
        ((2, 0, 3, 1), CONTEXT),
    ],
)
def test_averaging_is_over_all_ranks_in_ascending_order(ranks: Ranks, dims: Any, names: tuple[str, ...]) -> None:
    ranks(4).run(_average, dims, names)


def _take_parts() -> None:
    part = mesh_of(((2, 0), (3, 1)))["context"]
    members = [0, 2] if dist.get_rank() in (0, 2) else [1, 3]
    assert averaging_mesh(part).mesh.tolist() == members
    mesh = mesh_of(((0, 2), (1, 3)))
    assert replicating_mesh(mesh) is mesh


def test_averaging_over_a_part_of_a_mesh_and_replicating_over_a_whole_one(ranks: Ranks) -> None:
    ranks(4).run(_take_parts)


SQUARE = [[0, 1], [2, 3]]
REFUSED: list[tuple[list[Any], tuple[str, ...] | None, str]] = [
    (SQUARE, None, "got no names"),
    ([0, 1, 2, 3], ("data",), "got ('data',)"),
    (SQUARE, ("data", "tensor"), "got ('data', 'tensor')"),
    (SQUARE, ("tensor", "context"), "got ('tensor', 'context')"),
    ([[[0, 1]], [[2, 3]]], ("data", "tensor", "context"), "got ('data', 'tensor', 'context')"),
    # To average over these is fine.
    ([0, 1, 2, 3], CONTEXT, "to replicate over 'data', got ('context',)"),
    (SQUARE, ("context", "data"), "in this order, to replicate over 'data'"),
    ([[1, 0], [3, 2]], DATA_CONTEXT, "ascending ranks along 'context', got [[1, 0], [3, 2]]"),
    ([[0, 1], [3, 2]], DATA_CONTEXT, "ascending ranks along 'context'"),
]


def _refuse() -> None:
    for dims, names, words in REFUSED:
        mesh = DeviceMesh("cpu", torch.tensor(dims), mesh_dim_names=names, _init_backend=False)
        with pytest.raises(ValueError, match=f"mesh must have .*{re.escape(words)}"):
            replicating_mesh(mesh)
        if words.startswith("got"):
            with pytest.raises(ValueError, match=f"mesh must have .*{re.escape(words)}"):
                averaging_mesh(mesh)
    for function in (averaging_mesh, replicating_mesh):
        with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got a list"):
            function([0, 1])  # type: ignore[arg-type]


def test_meshes_of_other_dimensions_and_orders_are_refused(ranks: Ranks) -> None:
    ranks(4).run(_refuse)
