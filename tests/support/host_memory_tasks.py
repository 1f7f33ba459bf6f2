"""What ranks ask in their machine's memory: importable functions, for a pool of three."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import torch.distributed as dist

from ring.comm.host_memory import PAYLOAD, HostMemory
from ring.comm.transport import Absent

TIMEOUT = 1.5  # seconds


def memory(name: str, seconds: float = 60.0) -> HostMemory:
    group = dist.group.WORLD
    assert group is not None
    store = dist.PrefixStore(name, group.get_group_store())
    return HostMemory(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=seconds))


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
    page = HostMemory(store, rank, 3, timedelta(seconds=60))
    assert page.all_equal(answer(1), 1)
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
