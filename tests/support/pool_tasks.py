"""What the tests of the pool share: what ranks are asked to do, and what is asked of pools afterwards."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verification.failures import MismatchedMessages, RankFailure, RankHang
from verification.run.processes import rendezvous
from verification.run.processes.pool import Pool

WORLDS = [1, 3]
PRELOAD = ("torch", __name__)
FOREVER = 3600.0  # a timeout that a test which passes never meets
BRIEF = 0.2  # for calls that are known to hang already when it begins


# --- what ranks are asked to do -------------------------------------------------------------------------------------


def echo(*args: object) -> tuple[object, ...]:
    return (dist.get_rank(), *args)


def total(value: float) -> float:
    """Sum over the ranks of rank + value: works only if all ranks are one working group."""
    tensor = torch.tensor(dist.get_rank() + value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def shift(array: np.ndarray) -> np.ndarray:
    """The array of the left neighbour."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent, got = torch.from_numpy(array + rank), torch.empty(array.shape, dtype=torch.float64)
    if world == 1:
        return sent.numpy()
    works = [dist.isend(sent, (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
    for work in works:
        assert work is not None
        work.wait()
    return got.numpy()


def surroundings() -> dict[str, object]:
    threads = [torch.get_num_threads(), *(os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))]
    return {"threads": threads, "listening": listening(), "main": sys.modules["__main__"].__name__}


def listening() -> list[str]:
    """Addresses (hexadecimal, as /proc has them) that this process listens on."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_exists(fd)}
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def fd_exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def fail_on(culprits: tuple[int, ...], then_wait: bool) -> int:
    if dist.get_rank() in culprits:
        raise ZeroDivisionError(f"no luck on {dist.get_rank()}")
    if then_wait:
        dist.barrier()
    return dist.get_rank()


def die_on(folder: str, culprit: int, way: str) -> None:
    tell(folder)
    if dist.get_rank() == culprit:
        until(lambda: len(os.listdir(folder)) == dist.get_world_size())
        if way == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, way))
    dist.barrier()


def tell(folder: str) -> None:
    Path(folder, str(dist.get_rank())).touch()


def hang_in_gloo(folder: str, absent: int) -> None:
    tell(folder)
    if dist.get_rank() != absent:
        dist.barrier()


def hang_in_a_circle(folder: str) -> None:
    """Every rank waits in gloo for its neighbour's message, which nobody sends."""
    tell(folder)
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def compute_for(seconds: float) -> float:
    """Without a pause, so many seconds of processor time, however long that takes."""
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return time.process_time() - began


def hang_in_python(folder: str, culprit: int) -> None:
    tell(folder)
    if dist.get_rank() == culprit:
        time.sleep(FOREVER)


def stop_itself(folder: str, culprit: int) -> None:
    tell(folder)
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def mismatch() -> None:
    raise MismatchedMessages("hop 3 from rank 1: 40 bytes arrived, 48 were expected")


def unpicklable() -> object:
    return lambda: None


class Poisoned:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return int, ("not a number",)


def poisoned() -> Poisoned:
    return Poisoned()


def neighbours(ranks: tuple[int, ...]) -> tuple[int, list[int]] | None:
    """(own group rank, global ranks in the order of the group), learnt by an all-gather within the group."""
    group = rendezvous.subgroup(ranks)
    if group is None:
        return None
    assert rendezvous.subgroup(ranks) is group
    own = torch.tensor([dist.get_rank()])
    gathered = [torch.zeros_like(own) for _ in ranks]
    dist.all_gather(gathered, own, group=group)
    return dist.get_rank(group), [int(one) for one in gathered]


def go_through_subgroups(limit: int) -> tuple[int, int]:
    """(subgroups held, open descriptors) after a use of all three groups of two, with room for so many."""
    rendezvous.MAX_SUBGROUPS = limit
    for ranks in ((0, 1), (0, 2), (1, 2)):
        neighbours(ranks)
    return len(rendezvous._subgroups), len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool]) -> None:
    """Wait for it: fails only after a time that no machine needs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


# --- what is asked of pools -----------------------------------------------------------------------------------------


class Pools:
    """One pool for each size of world that is asked for."""

    def __init__(self) -> None:
        self.open: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if world not in self.open:
            self.open[world] = Pool(world, timeout=FOREVER, preload=PRELOAD)
        return self.open[world]

    def close(self) -> None:
        for pool in self.open.values():
            pool.close()


def works(pool: Pool) -> bool:
    world = pool.world_size
    return pool.run(total, 0.5) == [world * (world - 1) / 2 + world * 0.5] * world


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def failure_of(kind: type[RankFailure], pool: Pool, function: Callable[..., object], *args: object) -> RankFailure:
    """The failure of this call; all its ranks are dead by then, and the pool works."""
    pids = pool.pids
    with pytest.raises(kind) as caught:
        pool.run(function, *args)
    assert type(caught.value) is kind
    assert all(map(gone, pids))
    assert works(pool)
    return caught.value


def hang_of(pool: Pool, folder: Path, function: Callable[..., object], *args: object) -> RankHang:
    """The RankHang of this call, whose ranks all begin by `tell`ing the folder."""
    pids = pool.pids
    ticket = pool.submit(function, str(folder), *args)
    until(lambda: len(list(folder.iterdir())) == pool.world_size)
    with pytest.raises(RankHang) as caught:
        pool.collect(ticket, timeout=BRIEF)
    assert all(map(gone, pids))
    assert works(pool)
    return caught.value
