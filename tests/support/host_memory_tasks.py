"""What ranks ask in their machine's memory: importable functions, for a pool of three."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from unittest.mock import patch

import torch.distributed as dist

from ring.comm import host_memory, process_group
from ring.comm.host_memory import PAYLOAD, HostMemory, host_memory_of
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import Absent

TIMEOUT = 1.5  # seconds


def memory(name: str, seconds: float = 60.0) -> HostMemory:
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore(name, group.get_group_store())
    found = host_memory_of(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=seconds))
    assert found is not None
    return found


def answer(value: int) -> bytes:
    return value.to_bytes(PAYLOAD, "little")


def many_questions(name: str, seed: int) -> list[bool]:
    """To every fifth question one rank, another one each time, gives another answer. Ranks come at different times."""
    page, rank, found = memory(name), dist.get_rank(), []
    draw = random.Random(10 * seed + rank)
    for number in range(1, 400):
        apart = number % 5 == 0 and number // 5 % 3 == rank
        found.append(page.all_equal(answer(1000 + rank if apart else number), number))
        if draw.random() < 0.1:
            time.sleep(draw.choice((0.0, 1e-4, 3e-3)))
    return found


def many_questions_in(folder: str, name: str, seed: int) -> list[bool]:
    """The same, with pages in this folder: others are made in the usual one all the time."""
    with patch.object(host_memory, "FOLDER", folder):
        return many_questions(name, seed)


def page_where(name: str, what: str, where: int, folder: str) -> str:
    """What kind of page a group gets, in a folder, of which one rank finds another machine, or a folder that is not
    there.
    """
    group, rank, changes = dist.group.WORLD, dist.get_rank(), {"machine": lambda: "another", "FOLDER": "/nowhere"}
    assert group is not None
    store = dist.PrefixStore(f"{name} {what} {where}", group.get_group_store())
    with ExitStack() as patches:
        patches.enter_context(patch.object(host_memory, "FOLDER", folder))
        if rank == where:
            patches.enter_context(patch.object(host_memory, what, changes[what]))
        found = host_memory_of(store, rank, dist.get_world_size(), timedelta(seconds=60))
    return type(found).__name__


def page_that_one_cannot_open(name: str) -> str:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    failing = patch.object(host_memory, "HostMemory", side_effect=OSError(24, "Too many open files"))
    with failing if rank == 1 else nullcontext():
        return type(host_memory_of(dist.PrefixStore(name, group.get_group_store()), rank, 3, timedelta(60))).__name__


def one_does_not_come(name: str) -> tuple[tuple[int, ...] | None, str]:
    """To where the page is made. The ranks that are named, and whether that took the timeout."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    if rank == 1:
        return None, "stays away"
    began = time.monotonic()
    try:
        host_memory_of(dist.PrefixStore(name, group.get_group_store()), rank, 3, timedelta(seconds=TIMEOUT))
    except Absent as error:
        return error.ranks, "in time" if TIMEOUT <= time.monotonic() - began < TIMEOUT + 10 else "too late"
    return None, "found it"


def where_the_group_agrees(payload: int) -> list[bool]:
    """Three questions to the world, of which the second has two answers; the page is there from the first on."""
    transport = ProcessGroupTransport()
    others = [payload, payload + (dist.get_rank() == 1), payload]
    found = [transport.all_equal(answer(other)) for other in others]
    assert isinstance(process_group._memories[transport.group], HostMemory)
    made = transport.group.get_group_store().add(f"ring/machines/rank {dist.get_rank()}", 0)
    assert made == 1, f"a group that is made anew looks beyond the pages before it, of which {made} are counted"
    return found


def one_stays_away(name: str, absent: tuple[int, ...]) -> tuple[tuple[int, ...] | None, str, float]:
    """The ranks that are named, what is said, and after how many seconds; those that stay away come too late."""
    page, rank = memory(name, TIMEOUT), dist.get_rank()
    assert page.all_equal(answer(1), 1)
    if rank in absent:
        time.sleep(TIMEOUT + 4.0)
    began = time.monotonic()
    try:
        page.all_equal(answer(2), 2)
    except Absent as error:
        return error.ranks, error.waited, time.monotonic() - began
    return None, "fine", time.monotonic() - began


def one_is_killed(rank: int, folder: str) -> None:
    """In a process of its own: rank 1 ends between two questions."""
    store = dist.FileStore(os.path.join(folder, "store"), 3)
    page = host_memory_of(store, rank, 3, timedelta(seconds=60))
    assert page is not None and page.all_equal(answer(1), 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        page.all_equal(answer(2), 2)
        said = "fine"
    except Absent as error:
        said = f"{error.ranks} {error.waited} {time.monotonic() - began < 20}"
    with open(os.path.join(folder, f"said {rank}"), "w", encoding="ascii") as file:
        file.write(said)
