"""Ranks for users' own tests: processes that live as long as the session, and run one function after the other."""

from __future__ import annotations

from verification.run.processes.pool import Pool

# torch imports the latter two on first use, each rank for itself.
PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo", "hypothesis", "pytest")
TIMEOUT = 60.0  # seconds for a function, unless `run` is given another


class Ranks:
    """Groups of ranks by their number, started on first use: `ranks(4).run(function, *arguments)`.

    `run` calls the function on every rank and returns one result a rank. The function stands in a module, since it
    travels by its name; arguments and results travel by pickle. On a rank, torch.distributed's default group joins all
    ranks, with one thread a rank. A rank that raises, dies or gives no answer fails the call with the state of each;
    the next call meets new ranks.

    Args:
        preload: modules that ranks import before they start: those that take long.
    """

    def __init__(self, preload: tuple[str, ...] = PRELOAD) -> None:
        self._preload = preload
        self._pools: dict[tuple[int, str], Pool] = {}

    def __call__(self, world: int, joined_by: str = "gloo") -> Pool:
        """Return so many ranks.

        Args:
            world: number of ranks.
            joined_by: "gloo", or "nccl" with a GPU for each rank.

        Returns:
            The pool, whose `run(function, *arguments, timeout=)` returns one result a rank.

        Raises:
            PoolError: the ranks do not start.
        """
        if (world, joined_by) not in self._pools:
            self._pools[world, joined_by] = Pool(world, preload=self._preload, timeout=TIMEOUT, joined_by=joined_by)
        return self._pools[world, joined_by]

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()
