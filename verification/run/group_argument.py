"""The `group` argument as a user would pass it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from verification.case import Case
from verification.run.cross_host import CrossHostTransport

Group = Transport | dist.ProcessGroup | DeviceMesh | None


def user_group(transport: Transport) -> Transport | dist.ProcessGroup | None:
    """Return None if all ranks take part, otherwise their process group.

    A simulation has nothing but the transport itself. Ranks that agree as on several machines must do so in every call,
    so they keep their transport too.
    """
    if isinstance(transport, SoloTransport):
        return None
    if isinstance(transport, ProcessGroupTransport) and not isinstance(transport, CrossHostTransport):
        return None if transport.group is dist.group.WORLD else transport.group
    return transport


def bare_or_mesh(transport: Transport, case: Case) -> Group:
    """Return the user's group or, for odd seeds and where process groups exist, a mesh of one dimension."""
    group = user_group(transport)
    if case.seed % 2 == 0 or not dist.is_initialized() or isinstance(group, Transport):
        return group
    whole = dist.distributed_c10d._get_default_group()
    return DeviceMesh.from_group(whole if group is None else group, case.device)


def mesh_of_two_dimensions(case: Case) -> DeviceMesh | str:
    """Return a mesh of the Case's ranks; without process groups a string, which is no group either."""
    if not dist.is_initialized():
        return "a mesh"
    return DeviceMesh(case.device, [list(case.ranks)], mesh_dim_names=("data", "context"), _init_backend=False)
