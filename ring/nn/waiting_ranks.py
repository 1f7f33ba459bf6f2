"""Tells an error to the ranks that wait for this one, if it cannot know in which call and on which group they are.

Nothing is sent before a rank is seen to wait: a message on a group in which nobody waits would not be received.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from ring.comm.missing_ranks import read_timeout
from ring.comm.process_group import ProcessGroupTransport
from ring.consensus import compare

_PAUSE = 0.01  # seconds


def groups_of_this_thread() -> list[ProcessGroupTransport]:
    """Return the groups of several ranks, this one among them, on which no other thread calls."""
    transports = [ProcessGroupTransport(group) for group in dist.distributed_c10d._world.pg_map]
    return [x for x in transports if x.world_size > 1 and not x.calls.is_of_another_thread]


def raise_where_ranks_wait(where: str, error: Exception) -> NoReturn:
    """Raise this rank's error, also on all ranks of the first group in which all other ranks wait for this one.

    Several ranks may come here with errors, or all ranks of the world: the first one's is raised. A rank for which no
    group waits within the default group's timeout raises alone.

    Args:
        where: what this rank is doing.
        error: to raise.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise error
    world = ProcessGroupTransport(None)
    store = dist.PrefixStore("ring/refused", world.group.get_group_store())
    own, end = str(world.rank), time.monotonic() + read_timeout(world.group).total_seconds()
    store.set(own, "")
    try:
        while time.monotonic() < end:
            for transport in groups_of_this_thread():
                waiting = set(transport.waiting())
                ranks = dist.get_process_group_ranks(transport.group)
                others = [str(rank) for number, rank in enumerate(ranks) if number not in waiting]
                if (waiting or transport.group is world.group) and store.check(others):
                    compare(where, {}, error, transport)
            time.sleep(_PAUSE)
    finally:
        with suppress(RuntimeError):  # the rank that served the store has ended
            store.delete_key(own)
    raise error
