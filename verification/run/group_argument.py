"""What a user who knows nothing of transports gives as the group."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport, Transport
from verification.case import Case
from verification.run.cross_host import ApartTransport

Group = Transport | dist.ProcessGroup | DeviceMesh | None


def user_group(transport: Transport) -> Transport | dist.ProcessGroup | None:
    """What a user would pass who knows nothing of transports: None where all ranks take part, their group otherwise. In
    a simulation there is no such thing but the transport itself. Ranks that are to agree as on several machines do so
    by their transport, whatever call each of them is in.
    """
    if isinstance(transport, SoloTransport):
        return None
    if isinstance(transport, ProcessGroupTransport) and not isinstance(transport, ApartTransport):
        return None if transport.group is dist.group.WORLD else transport.group
    return transport


def bare_or_mesh(transport: Transport, case: Case) -> Group:
    """Likewise; for every other seed a mesh of one dimension, where there are process groups."""
    group = user_group(transport)
    if case.seed % 2 == 0 or not dist.is_initialized() or isinstance(group, Transport):
        return group
    whole = dist.distributed_c10d._get_default_group()
    return DeviceMesh.from_group(whole if group is None else group, case.device)


def mesh_of_two_dimensions(case: Case) -> DeviceMesh | str:
    """Of the ranks of the Case; where there are no process groups a word, which is no group either."""
    if not dist.is_initialized():
        return "a mesh"
    return DeviceMesh(case.device, [list(case.ranks)], mesh_dim_names=("data", "context"), _init_backend=False)
