"""The `group` argument of `ring_attention`, and the transport over it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist

from ring.comm.process_group import ProcessGroupTransport, backends_of
from ring.comm.transport import SoloTransport, Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def transport_over(group: dist.ProcessGroup | DeviceMesh | Transport | None, world_size: int) -> Transport:
    """Return the transport over a process group, a one-dimensional mesh, or None: the default group, or no group for a
    world of one. world_size: of the layout.

    Raises ValueError for anything else, for a mesh of more dimensions, and on a process that is not a member.
    """
    if group is None and not dist.is_initialized():
        if world_size != 1:
            raise ValueError(
                f"group must be given, or torch.distributed initialised, for a layout of {world_size} ranks"
            )
        return SoloTransport()
    if group is None or isinstance(group, dist.ProcessGroup):
        return ProcessGroupTransport(group)
    if is_mesh(group):
        return ProcessGroupTransport(_find_group(group))
    if _is_transport(group):
        return group
    raise ValueError(f"group must be a process group, a mesh, a Transport or None, got {group!r}")


def device_for(transport: Transport, device: torch.device) -> torch.device:
    """Return the device of messages from `device`: the same, or the current GPU if the group has no backend for it."""
    if isinstance(transport, ProcessGroupTransport) and device.type not in backends_of(transport.group):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _is_transport(group: object) -> TypeGuard[Transport]:
    """Check the bases first: isinstance of a protocol takes 0.3 ms."""
    return Transport in type(group).__mro__ or isinstance(group, Transport)


def is_mesh(group: object) -> TypeGuard[DeviceMesh]:
    """Return True for a DeviceMesh. Looks the class up without an import: whoever has a mesh has imported it."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(group, module.DeviceMesh)


def _find_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ValueError(
            f"group must be a mesh of one dimension, got {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: "
            'take the one along which the sequence is sharded, as mesh["context"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"group must contain the calling process; world rank {dist.get_rank()} is not in {mesh!r}")
    return mesh.get_group()
