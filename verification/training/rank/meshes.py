"""The meshes of this rank's process. Making one makes process groups, so each is made once and kept."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import RecordingTransport, Transport
from verification.training.training_case import TrainingCase


def mesh_of(case: TrainingCase) -> DeviceMesh:
    """("data", "context"). Called by all ranks, in the same order of Cases."""
    return _mesh(case.mesh, case.device)


@cache
def _mesh(ranks: tuple[tuple[int, ...], ...], device: str) -> DeviceMesh:
    return DeviceMesh(device, ranks, mesh_dim_names=("data", "context"))


def reversed_mesh_of(case: TrainingCase) -> DeviceMesh:
    """All ranks along one dimension, the last one first. Called by all ranks, in the same order of Cases."""
    return _reversed_mesh(case.world, case.device)


@cache
def _reversed_mesh(world: int, device: str) -> DeviceMesh:
    return DeviceMesh(device, list(reversed(range(world))), mesh_dim_names=("ranks",))


def handle_of(case: TrainingCase) -> dist.ProcessGroup | DeviceMesh | Transport:
    """What the context handle is given as its group."""
    mesh = mesh_of(case)["context"]
    if case.handle == "mesh":
        return mesh
    group = mesh.get_group()
    return RecordingTransport(transport_of(group)) if case.handle == "recorded" else group


def descending_mesh_of(case: TrainingCase) -> DeviceMesh:
    """("data", "context"), with the ranks of the Case's mesh in reverse order. Called by all ranks, likewise."""
    return _mesh(tuple(line[::-1] for line in case.mesh[::-1]), case.device)


def turned_mesh_of(case: TrainingCase) -> DeviceMesh:
    """("context", "data"): the ranks of the Case's mesh, its dimensions the other way round. It has no groups."""
    columns = [list(line) for line in zip(*case.mesh, strict=True)]
    return DeviceMesh(case.device, columns, mesh_dim_names=("context", "data"), _init_backend=False)


def wide_mesh_of(case: TrainingCase) -> DeviceMesh:
    """("data", "tensor", "context"), one rank wide along "tensor". It has no groups."""
    lines = [[list(line)] for line in case.mesh]
    return DeviceMesh(case.device, lines, mesh_dim_names=("data", "tensor", "context"), _init_backend=False)


def small_mesh_of(case: TrainingCase, descending: bool) -> DeviceMesh:
    """A mesh of two dimensions of some of the ranks: of as many as two numbers of at least 2 make, or one of them is 1.
    Called by all ranks, likewise."""
    most = max(1, case.world - 1)
    rows = next((rows for rows in (2, 3) if most >= 2 * rows), 1)
    columns = most // rows
    rows, columns = (columns, rows) if descending else (rows, columns)
    ranks = list(range(rows * columns))
    ranks = ranks[::-1] if descending else ranks
    return _small_mesh(tuple(tuple(ranks[i : i + columns]) for i in range(0, len(ranks), columns)), case.device)


@cache
def _small_mesh(ranks: tuple[tuple[int, ...], ...], device: str) -> DeviceMesh:
    return DeviceMesh(device, ranks, mesh_dim_names=("rows", "columns"))
