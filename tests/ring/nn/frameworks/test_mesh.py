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
AVERAGED: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "neighbours": (((0, 1), (2, 3)), DATA_CONTEXT),
    "not neighbours": (((0, 2), (1, 3)), DATA_CONTEXT),
    "descending": (((3, 2), (1, 0)), DATA_CONTEXT),
    "context first": (((0, 1), (2, 3)), ("context", "data")),
    "context alone": ((0, 1, 2, 3), CONTEXT),
    "context alone, descending": ((3, 2, 1, 0), CONTEXT),
    "context alone, in no order": ((2, 0, 3, 1), CONTEXT),
}


def _average(ranks: tuple[Any, ...], names: tuple[str, ...]) -> None:
    averaged = averaging_mesh(mesh_of(ranks, names))
    assert (averaged.ndim, averaged.mesh.tolist()) == (1, [0, 1, 2, 3])
    assert averaged.get_local_rank() == dist.get_rank()
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=averaged.get_group())
    assert total == 15.0


@pytest.mark.parametrize("name", AVERAGED)
def test_averaging_is_over_all_ranks_in_ascending_order(ranks: Ranks, name: str) -> None:
    ranks(4).run(_average, *AVERAGED[name])


def _average_a_part() -> None:
    part = mesh_of(((2, 0), (3, 1)))["context"]
    members = [0, 2] if dist.get_rank() in (0, 2) else [1, 3]
    assert averaging_mesh(part).mesh.tolist() == members


def test_averaging_over_a_part_of_a_mesh(ranks: Ranks) -> None:
    ranks(4).run(_average_a_part)


NOT_AVERAGED: dict[str, tuple[list[Any], tuple[str, ...] | None, str]] = {
    "no names": ([[0, 1], [2, 3]], None, "got no names"),
    "data alone": ([0, 1, 2, 3], ("data",), "got ('data',)"),
    "another dimension": ([[0, 1], [2, 3]], ("data", "tensor"), "got ('data', 'tensor')"),
    "context and another": ([[0, 1], [2, 3]], ("tensor", "context"), "got ('tensor', 'context')"),
    "one dimension more": ([[[0, 1]], [[2, 3]]], ("data", "tensor", "context"), "got ('data', 'tensor', 'context')"),
}
NOT_REPLICATED = {
    "context alone": ([0, 1, 2, 3], CONTEXT, "to replicate over 'data', got ('context',)"),
    "context first": ([[0, 1], [2, 3]], ("context", "data"), "in this order, to replicate over 'data'"),
    "descending": ([[1, 0], [3, 2]], DATA_CONTEXT, "ascending ranks along 'context', got [[1, 0], [3, 2]]"),
    "one line descends": ([[0, 1], [3, 2]], DATA_CONTEXT, "ascending ranks along 'context'"),
}


def _refuse(kind: str, dims: list[Any], names: tuple[str, ...] | None, words: str) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(dims), mesh_dim_names=names, _init_backend=False)
    with pytest.raises(ValueError, match=f"mesh must have .*{re.escape(words)}"):
        (averaging_mesh if kind == "average" else replicating_mesh)(mesh)


@pytest.mark.parametrize("name", NOT_AVERAGED)
@pytest.mark.parametrize("kind", ["average", "replicate"])
def test_meshes_of_other_dimensions_are_refused(ranks: Ranks, kind: str, name: str) -> None:
    ranks(4).run(_refuse, kind, *NOT_AVERAGED[name])


@pytest.mark.parametrize("name", NOT_REPLICATED)
def test_meshes_that_cannot_replicate_are_refused(ranks: Ranks, name: str) -> None:
    ranks(4).run(_refuse, "replicate", *NOT_REPLICATED[name])


def _replicate() -> None:
    mesh = mesh_of(((0, 2), (1, 3)))
    assert replicating_mesh(mesh) is mesh


def test_a_mesh_that_replicates_is_taken_as_it_is(ranks: Ranks) -> None:
    ranks(4).run(_replicate)


def test_what_is_no_mesh_is_refused() -> None:
    for function in (averaging_mesh, replicating_mesh):
        with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got a list"):
            function([0, 1])  # type: ignore[arg-type]
