"""Device meshes of this process. Creating one creates process groups, so each is cached."""

from __future__ import annotations

from functools import cache

from torch.distributed.device_mesh import DeviceMesh

from verification.models.step_case import StepCase


def mesh_of(case: StepCase) -> DeviceMesh:
    """Return the mesh ("data", "context"). Collective: all ranks call it in the same order of Cases."""
    return _mesh(case.mesh, case.device)


@cache
def _mesh(ranks: tuple[tuple[int, ...], ...], device: str) -> DeviceMesh:
    return DeviceMesh(device, ranks, mesh_dim_names=("data", "context"))
