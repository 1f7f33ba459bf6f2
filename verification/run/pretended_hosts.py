"""Process groups whose ranks pretend to be on the hosts of a Case, to exchanges that depend on hosts.

`Transport.hosts` tells hosts apart by NCCL_HOSTID. It is set while the ranks of a group meet, before the first call on
the group, and not while NCCL connects them: links stay what they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch.distributed as dist

from ring.comm.process_group import ProcessGroupTransport
from ring.plan.exchange import depends_on_hosts
from verification.case import Case
from verification.protocols import CaseLike
from verification.run.processes.rendezvous import subgroup

_NAME = "NCCL_HOSTID"


def make_group(case: CaseLike) -> dist.ProcessGroup | None:
    """Return the group of the Case's ranks; None on ranks outside it.

    Collective: *all* ranks of the world call it, in the same order. An exchange that depends on hosts gets a group of
    its own, unless the ranks are on the Case's hosts anyway.
    """
    if not _pretends(case):
        return subgroup(case.ranks)
    pretended = list_hosts(case)
    everywhere = ProcessGroupTransport().hosts  # known to the ranks outside the group too
    if _by_first_appearance([everywhere[rank] for rank in case.ranks]) == pretended:
        return subgroup(case.ranks)
    group = subgroup(case.ranks, number=case.hosts)
    if group is not None:
        with pretending(case, dist.get_rank(group)):
            met = ProcessGroupTransport(group).hosts
        assert met == pretended, f"a group that met on hosts {met} cannot pretend hosts {pretended}"
    return group


@contextmanager
def pretending(case: CaseLike, index: int) -> Iterator[None]:
    """Have the rank at that index of the group meet the others on its host of the Case, within the block."""
    if not _pretends(case):
        yield
        return
    before = os.environ.get(_NAME)
    os.environ[_NAME] = f"host {list_hosts(case)[index]}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before


def _pretends(case: CaseLike) -> TypeGuard[Case]:
    return isinstance(case, Case) and depends_on_hosts(case.exchange)


def list_hosts(case: Case) -> tuple[int, ...]:
    """Return the host of each rank of the group."""
    ranks = len(case.ranks)
    return tuple(index * case.hosts // ranks for index in range(ranks))


def _by_first_appearance(hosts: Sequence[int]) -> tuple[int, ...]:
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)
