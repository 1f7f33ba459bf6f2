"""The process group of one generation of ranks, and its subgroups.

Import torch inside the functions only: ranks get it from the forkserver's preload, and check that.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

# Longer than any timeout of the pool: leave it to the pool to find a hang, since it can show every rank's stack.
GROUP_TIMEOUT = datetime.timedelta(days=1)
# A gloo group holds a socket to each other member: beyond this many groups, the least recently used is destroyed.
MAX_SUBGROUPS = 32

_subgroups: OrderedDict[tuple[tuple[int, ...], int], ProcessGroup | None] = OrderedDict()


@dataclass(frozen=True)
class Rendezvous:
    """The store through which the ranks of one generation meet: a FileStore, or a TCPStore of another process."""

    path: str = ""  # of the FileStore
    host: str = ""  # of the TCPStore
    port: int = 0
    prefix: str = ""

    def store(self, world_size: int) -> Store:
        from torch.distributed import FileStore, PrefixStore, TCPStore

        if self.path:
            # Keep the file open: once its creator has ended, FileStore would look for it for five minutes, with
            # Python's lock held, so that this process could not end either.
            file = os.open(self.path, os.O_RDWR)
            return FileStore(f"/proc/self/fd/{file}", world_size)
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, is_master=False))


class LocalRendezvous:
    """A rendezvous of processes of this machine through its own file. The process that made it must close it."""

    def __init__(self) -> None:
        # Use an anonymous file: none is left behind however this process ends. A TCPStore would need a port, and
        # stalled for the 5 s of a name server's timeout.
        self._file = os.memfd_create("rendezvous")
        self.rendezvous = Rendezvous(path=f"/proc/{os.getpid()}/fd/{self._file}")

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class Membership:
    """The arguments with which a process becomes a rank."""

    rank: int
    world_size: int
    rendezvous: Rendezvous
    preload: tuple[str, ...]  # modules that the forkserver must have imported
    joined_by: str  # "gloo" or "nccl"
    gpu: int  # index of this process's GPU, for NCCL
    one_machine: bool = True  # all ranks are on this machine, so gloo uses its loopback interface


def join_group(membership: Membership) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if membership.one_machine:
        os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    device = None
    if membership.joined_by == "nccl":
        device = torch.device("cuda", membership.gpu)
        # Sum in the same order in every run: two runs are compared bit for bit.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(device)
    dist.init_process_group(
        membership.joined_by,
        store=membership.rendezvous.store(membership.world_size),
        rank=membership.rank,
        world_size=membership.world_size,
        timeout=GROUP_TIMEOUT,
        device_id=device,  # NCCL then connects now, not within the first example
    )


def subgroup(ranks: tuple[int, ...], number: int = 0) -> ProcessGroup | None:
    """Return the group of these global ranks, which group rank i has as `ranks[i]`; None on ranks outside it.

    Collective: *all* ranks of the world call it, in the same order. Groups are cached (the last 32); that of all ranks
    is the default group. number: of another group of the same ranks, if it is not 0.

    Raises ValueError unless there is a rank, and all are of the world and ascend (torch sorts those of a group).
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= world:
        raise ValueError(f"ranks: got {ranks}; allowed are ascending ranks of 0..{world - 1}, at least one")
    if ranks == tuple(range(world)) and not number:
        return dist.group.WORLD
    key = ranks, number
    if key not in _subgroups:
        if len(_subgroups) == MAX_SUBGROUPS:
            _, eldest = _subgroups.popitem(last=False)
            if eldest is not None:
                dist.destroy_process_group(eldest)
        group: Any = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
        _subgroups[key] = None if group == dist.GroupMember.NON_GROUP_MEMBER else group
    _subgroups.move_to_end(key)
    return _subgroups[key]
