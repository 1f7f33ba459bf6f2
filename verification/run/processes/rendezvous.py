"""How the ranks of one generation come together in a process group, and in subgroups of it.

torch is imported inside the functions, not here: ranks get it from the forkserver's preload, and check that.
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

# Longer than any timeout of the pool: only the pool decides that a rank hangs, since it can show every rank's stack.
GROUP_TIMEOUT = datetime.timedelta(days=1)
# A gloo group holds a socket to each other member: beyond so many groups, the one unused for longest is destroyed.
MAX_SUBGROUPS = 32

_subgroups: OrderedDict[tuple[int, ...], ProcessGroup | None] = OrderedDict()


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one generation find each other: a FileStore, or a TCPStore that another process serves."""

    path: str = ""  # of the FileStore
    host: str = ""  # of the TCPStore
    port: int = 0
    prefix: str = ""

    def store(self, world_size: int) -> Store:
        from torch.distributed import FileStore, PrefixStore, TCPStore

        if self.path:
            # Once the process that made the file has ended, FileStore would look for it for five minutes, with Python's
            # lock held, so that this process could not end either. Held open here, the file stays.
            held = os.open(self.path, os.O_RDWR)
            return FileStore(f"/proc/self/fd/{held}", world_size)
        return PrefixStore(self.prefix, TCPStore(self.host, self.port, is_master=False))


class LocalRendezvous:
    """A rendezvous of processes of this machine, in a file of its own, which the process that made it must close."""

    def __init__(self) -> None:
        # A file without a name: each generation has its own, and none is left behind however this process ends.
        # (A TCPStore would need a port, and was seen to stall for the 5 s of a name server's timeout.)
        self._file = os.memfd_create("rendezvous")
        self.rendezvous = Rendezvous(path=f"/proc/{os.getpid()}/fd/{self._file}")

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class Membership:
    """What a process needs to know to be a rank."""

    rank: int
    world_size: int
    rendezvous: Rendezvous
    preload: tuple[str, ...]  # modules that must have come with the fork
    joined_by: str  # "gloo", or "nccl"
    gpu: int  # the number of this process's GPU, if NCCL joins it to the others
    one_machine: bool = True  # whether all ranks are on this machine: gloo then uses its loopback interface


def join_group(membership: Membership) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if membership.one_machine:
        os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    device = None
    if membership.joined_by == "nccl":
        device = torch.device("cuda", membership.gpu)
        # Sums in the same order in every run: two runs are compared bit for bit.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(device)
    dist.init_process_group(
        membership.joined_by,
        store=membership.rendezvous.store(membership.world_size),
        rank=membership.rank,
        world_size=membership.world_size,
        timeout=GROUP_TIMEOUT,
        device_id=device,  # given one, NCCL connects now, not within the first example
    )


def subgroup(ranks: tuple[int, ...]) -> ProcessGroup | None:
    """The group of these global ranks (group rank i is global rank `ranks[i]`); None on ranks that are no members. To
    be called inside a rank, by *all* ranks of the world, in the same order of calls. It is made on first use and kept
    (the last 32 are). For all ranks it is the default group itself.

    Raises ValueError unless the ranks ascend (torch sorts those of a group), are some, and are of the world.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= world:
        raise ValueError(f"ranks: got {ranks}; allowed are ascending ranks of 0..{world - 1}, at least one")
    if ranks == tuple(range(world)):
        return dist.group.WORLD
    if ranks not in _subgroups:
        if len(_subgroups) == MAX_SUBGROUPS:
            _, eldest = _subgroups.popitem(last=False)
            if eldest is not None:
                dist.destroy_process_group(eldest)
        made: Any = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
        _subgroups[ranks] = None if made == dist.GroupMember.NON_GROUP_MEMBER else made
    _subgroups.move_to_end(ranks)
    return _subgroups[ranks]
