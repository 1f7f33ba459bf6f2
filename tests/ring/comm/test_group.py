"""Arguments allowed as a group: process groups, meshes of one dimension, transports, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from reference import Pattern, attention
from ring import Layout, ring_attention
from ring.comm.group import transport_over
from ring.comm.transport import SoloTransport
from tests.support.ranks import Ranks
from verification.run.recording_transport import RecordingTransport

pytestmark = pytest.mark.ranks


def test_one_process_needs_no_group() -> None:
    assert isinstance(transport_over(None, 1), SoloTransport)
    with pytest.raises(ValueError, match="group must be given, or torch.distributed initialised, for a layout of 2"):
        transport_over(None, 2)


class Alike:
    """All that a transport has, without being derived from one."""

    def __init__(self, inner: SoloTransport) -> None:
        self.rank, self.world_size, self.calls = inner.rank, inner.world_size, inner.calls
        self.post, self.prepare, self.empty = inner.post, inner.prepare, inner.empty
        self.all_equal, self.all_gather, self.hosts = inner.all_equal, inner.all_gather, inner.hosts


@pytest.mark.parametrize("transport", (RecordingTransport(SoloTransport()), Alike(SoloTransport())))
def test_a_transport_is_taken_as_it_is(transport: Any) -> None:
    assert transport_over(transport, 1) is transport
    q, k, v = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64)
    out = ring_attention(q, k, v, Pattern.dense(), Layout.contiguous(6, 1), group=transport)
    torch.testing.assert_close(out, attention(q, k, v, Pattern.dense())[0])


@pytest.mark.parametrize("group", ("gloo", 3, object))
def test_anything_else_is_refused(group: object) -> None:
    with pytest.raises(ValueError, match="group must be a process group, a mesh, a Transport or None, got"):
        transport_over(group, 1)  # type: ignore[arg-type]


def _end(mesh: DeviceMesh) -> None:
    """Leave no group in the rank but the default one."""
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _calls_over_a_mesh() -> None:
    """Whole, and as a part of a mesh of two; its calls and those on its process group are numbered together."""
    rank, whole = dist.get_rank(), transport_over(init_device_mesh("cpu", (4,)), 4)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))
    mesh = square["context"]
    part, layout = transport_over(mesh, 2), Layout.zigzag(10, 2)
    assert (whole.rank, whole.world_size, part.rank, part.world_size) == (rank, 4, rank // 2, 2)
    assert dist.get_process_group_ranks(mesh.get_group()) == [rank % 2, rank % 2 + 2]
    q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = layout.shard(attention(q, k, v, Pattern.dense())[0], part.rank)
    q, k, v = (layout.shard(x, part.rank) for x in (q, k, v))
    groups: list[Any] = [mesh, mesh.get_group(), mesh]
    for number, group in enumerate(groups, 1):
        out = ring_attention(q, k, v, Pattern.dense(), layout, group=group)
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)
        assert part.calls.number == number
    _end(square)


def _meshes_that_do_not_fit() -> None:
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    with pytest.raises(ValueError, match=r'a mesh of one dimension, got 2 dimensions .*, as mesh\["context"\]'):
        transport_over(flat, 2)
    _end(flat)
    part, rank = DeviceMesh("cpu", [0, 1]), dist.get_rank()
    if rank < 2:
        assert transport_over(part, 2).rank == rank
        _end(part)
    else:
        with pytest.raises(ValueError, match=f"group must contain the calling process; world rank {rank} is not in"):
            transport_over(part, 2)


def _dtensors() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for name in "qkv":
        tensors: dict[str, Any] = {one: torch.zeros(1, 2, 1, 4) for one in "qkv"}
        if dist.get_rank() == 1:
            tensors[name] = DTensor.from_local(tensors[name], mesh, [Shard(1)])
        said = rf"rank 1: {name} must be a plain tensor, .*Shard\(dim=1\).* give {name}\.to_local"
        with pytest.raises(NotImplementedError, match=said):
            ring_attention(**tensors, pattern=Pattern.dense(), layout=Layout.contiguous(8, 4))


@pytest.mark.parametrize("task", (_calls_over_a_mesh, _meshes_that_do_not_fit, _dtensors))
def test_only_meshes_of_one_dimension_are_taken(ranks: Ranks, task: Callable[[], None]) -> None:
    ranks(4).run(task)
