"""Meshes over which gradients are averaged, and over which FSDP replicates: their ranks, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Linear

from ring.integrations.wrappers import ddp, fsdp
from ring.integrations.wrappers.mesh import averaging_mesh, replicating_mesh
from tests.support.framework_example import mesh_of
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks

DATA_CONTEXT, CONTEXT = ("data", "context"), ("context",)
SQUARE = ((0, 1), (2, 3))


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


def _slice(dims: Any, names: tuple[str, ...], kept: tuple[str, ...], alike: Any) -> list[int]:
    averaged = averaging_mesh(mesh_of(dims, names)[kept], alike)
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=averaged.get_group())
    members: list[int] = averaged.mesh.tolist()
    assert total == sum(2.0**rank for rank in members)
    return members


CUBE = (((0, 1),), ((2, 3),))
LEVELS = ("replicate", "shard", "cp")


@pytest.mark.parametrize(
    "dims, names, kept, alike, members",
    [
        (CUBE, LEVELS, LEVELS, (), [[0, 1, 2, 3]] * 4),
        (CUBE, LEVELS, ("replicate", "cp"), (), [[0, 1, 2, 3]] * 4),  # what is left out has one rank
        (CUBE, ("dp", "pp", "tp"), ("dp", "pp"), "tp", [[0, 2], [1, 3]] * 2),
        (CUBE, ("pp", "dp", "cp"), ("dp", "cp"), ["pp"], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (((3, 1), (2, 0)), ("cp", "tp"), ("cp",), "tp", [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_slices_leave_out_only_ranks_with_the_same_tokens(
    ranks: Ranks, dims: Any, names: Any, kept: Any, alike: Any, members: list[list[int]]
) -> None:
    found = ranks(4).run(_slice, dims, names, kept, alike)
    assert sorted(found) == sorted(members) and all(rank in found[rank] for rank in range(4))


def _replicate(dims: Any, names: tuple[str, ...], replicate: Any, kept: tuple[str, ...], alike: Any) -> list[list[int]]:
    both = replicating_mesh(mesh_of(dims, names)[kept], replicate, alike)
    rows: list[list[int]] = both.mesh.tolist()
    for dim in range(2):
        line = both.mesh.movedim(dim, 1)
        (mine,) = [x.tolist() for x in line if dist.get_rank() in x]
        assert sorted(dist.get_process_group_ranks(both.get_group(dim))) == sorted(mine)
    return rows


@pytest.mark.parametrize(
    "dims, names, replicate, kept, alike, rows",
    [
        (SQUARE, ("data", "context"), "data", ("data", "context"), (), [[0, 1], [2, 3]]),
        (SQUARE, ("cp", "dp"), "dp", ("cp", "dp"), (), [[0, 2], [1, 3]]),
        (((3, 2), (1, 0)), ("cp", "dp"), ["cp"], ("cp", "dp"), (), None),
        (CUBE, LEVELS, "replicate", LEVELS, (), [[0, 1], [2, 3]]),
        (CUBE, LEVELS, ("shard", "replicate"), LEVELS, (), [[0, 1], [2, 3]]),
        (CUBE, ("dp", "cp", "tp"), "dp", ("dp", "cp"), "tp", [[0], [2]]),
    ],
)
def test_replicas_and_shards(
    ranks: Ranks, dims: Any, names: Any, replicate: Any, kept: Any, alike: Any, rows: Any
) -> None:
    if rows is None:
        with pytest.raises(Exception, match=r"mesh must have ascending ranks along \('dp',\)"):
            ranks(4).run(_replicate, dims, names, replicate, kept, alike)
    else:
        assert ranks(4).run(_replicate, dims, names, replicate, kept, alike)[0] == rows


def _refuse() -> None:
    mesh, cube = mesh_of(SQUARE), mesh_of(CUBE, LEVELS)
    cases: list[tuple[Any, Any, str]] = [
        (mesh["data"], (), "got 2 of the 4 ranks of its root mesh ('data', 'context'): slice ('data',) and the other"),
        (mesh["context"], (), "got 2 of the 4 ranks"),
        (cube["shard", "cp"], (), "got 2 of the 4 ranks of its root mesh ('replicate', 'shard', 'cp')"),
        (cube["cp"], "shard", "got 2 of the 4 ranks"),
        (
            cube["cp"],
            "tensor",
            "same_tokens must name dimensions of the root mesh that mesh leaves out, ['replicate', ",
        ),
        (mesh, "data", "same_tokens must name dimensions of the root mesh that mesh leaves out, [], got ['data']"),
        (DeviceMesh("cpu", torch.tensor(SQUARE)), (), "mesh must have named dimensions"),
        ([0, 1], (), "mesh must be a DeviceMesh, got a list"),
    ]
    for given, alike, words in cases:
        for function in (averaging_mesh, lambda mesh, alike: replicating_mesh(mesh, "shard", alike)):
            with pytest.raises(ValueError, match=re.escape(words)):
                function(given, alike)
    for replicate in ("tensor", (), LEVELS, ("shard", "tensor")):
        with pytest.raises(ValueError, match="replicate must name dimensions of mesh"):
            replicating_mesh(cube, replicate)


def test_meshes_that_leave_out_ranks_are_refused(ranks: Ranks) -> None:
    ranks(4).run(_refuse)


@pytest.mark.parametrize(
    "function, arguments",
    [
        (ddp.wrap, (Linear, [0])),
        (fsdp.shard, (Linear, [0], Linear)),
        (averaging_mesh, ([0],)),
        (replicating_mesh, ([0], "a")),
    ],
)
def test_same_tokens_is_taken_by_its_former_name(function: Any, arguments: Any) -> None:
    words = "same_tokens must be names of mesh dimensions, such as 'data', got 3"
    with pytest.warns(DeprecationWarning, match="alike is now same_tokens"), pytest.raises(ValueError, match=words):
        function(*arguments, alike=3)
    with pytest.warns(DeprecationWarning, match="alike"), pytest.raises(ValueError, match="same_tokens must be given"):
        function(*arguments, alike="tensor", same_tokens="tensor")
