"""Device meshes of this process. Creating one creates process groups, so each is cached."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import RecordingTransport, Transport
from verification.training.training_case import TrainingCase


def mesh_of(case: TrainingCase) -> DeviceMesh:
    """Return the mesh ("data", "context"). Collective: all ranks call it in the same order of Cases."""
    return _mesh(case.mesh, case.device)


@cache
def _mesh(ranks: tuple[tuple[int, ...], ...], device: str) -> DeviceMesh:
    return DeviceMesh(device, ranks, mesh_dim_names=("data", "context"))


def handle_of(case: TrainingCase) -> dist.ProcessGroup | DeviceMesh | Transport:
    """Return the group argument of the context handle."""
    mesh = mesh_of(case)["context"]
    if case.handle == "mesh":
        return mesh
    group = mesh.get_group()
    return RecordingTransport(transport_of(group)) if case.handle == "recorded" else group
