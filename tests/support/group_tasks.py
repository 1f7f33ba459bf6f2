"""What ranks of a pool of four are asked to do with groups of several kinds: importable functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ring import Layout, Pattern, ring_attention
from ring.comm.group import transport_over
from tests.support.call_tasks import Caller


def calls_over_meshes() -> tuple[Any, ...]:
    """(rank, size) of a whole mesh and of a part, whose ranks do not lie side by side; its global ranks; the numbers of
    calls on the part by itself, by its process group, and by itself again; the worst error.
    """
    whole = init_device_mesh("cpu", (4,))
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))["context"]
    group, numbers, worst = part.get_group(), [], 0.0
    for given in (part, group, part):
        caller = Caller(given, 2)
        flight = caller.forward(1)
        caller.backward(flight)
        assert caller.errors == []
        numbers.append(caller.transport.calls.number)
        worst = max(worst, caller.worst)
    ranks = dist.get_process_group_ranks(group)
    return (*(_place(mesh) for mesh in (whole, part)), ranks, numbers, worst)


def _place(mesh: DeviceMesh) -> tuple[int, int]:
    transport = transport_over(mesh, mesh.size())
    return transport.rank, transport.world_size


def meshes_that_do_not_fit() -> tuple[str, str]:
    """What is said of a mesh of two dimensions, and of one that this rank may not be in."""
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    return _said(flat), _said(DeviceMesh("cpu", [0, 1]))


def _said(mesh: DeviceMesh) -> str:
    try:
        transport_over(mesh, 2)
    except ValueError as error:
        return str(error)
    return "taken"


def dtensors() -> list[str]:
    """What is said where rank 1 gives q, k or v as a DTensor."""
    mesh, rank, said = init_device_mesh("cpu", (4,)), dist.get_rank(), []
    for name in "qkv":
        tensors: dict[str, Any] = {one: torch.zeros(1, 2, 1, 4) for one in "qkv"}
        if rank == 1:
            tensors[name] = DTensor.from_local(tensors[name], mesh, [Shard(1)])
        try:
            ring_attention(**tensors, pattern=Pattern.dense(), layout=Layout.contiguous(8, 4))
        except NotImplementedError as error:
            said.append(f"NotImplementedError: {error}")
    return said
