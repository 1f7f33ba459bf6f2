"""Pools of ranks that live as long as the tests: `ranks(4).run(task, *arguments)` returns one result a rank.

A rank imports the test file by its name on the first task from it, so what a test file needs of torch and pytest is in
the forkserver's preload: then this takes milliseconds.
"""

from collections.abc import Iterator
from typing import Protocol

import pytest

from verification.run.processes.pool import Pool

# torch imports the latter two on first use, each rank for itself.
PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo", "hypothesis", "pytest", "ring.nn")
TIMEOUT = 60.0  # seconds for a task, unless `run` is given another


class Ranks(Protocol):
    """The type of the fixture `ranks`."""

    def __call__(self, world: int, joined_by: str = "gloo") -> Pool:
        """Return the pool of so many ranks, started on first use; joined_by: "gloo" or "nccl"."""


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pools: dict[tuple[int, str], Pool] = {}

    def pool_of(world: int, joined_by: str = "gloo") -> Pool:
        if (world, joined_by) not in pools:
            pools[world, joined_by] = Pool(world, preload=PRELOAD, timeout=TIMEOUT, joined_by=joined_by)
        return pools[world, joined_by]

    yield pool_of
    for pool in pools.values():
        pool.close()
