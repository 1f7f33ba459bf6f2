"""Where ranks run: one interface, behind it processes joined by gloo today, other places later.

A backend is given a *task*: a function of `verification.execute` that takes a `Transport` and a Case and does
what one rank does. `submit` starts it on every rank of the Case's group, `collect` waits for the answers; in
between, the parent computes what to expect. A task knows nothing of how its ranks came to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ring.transport import ProcessGroupTransport, SoloTransport, Transport
from verification.case import Case
from verification.checks import Observation
from verification.execute import observe
from verification.failures import RankFailure
from verification.pool import Pool, PoolError, Ticket
from verification.worker import subgroup

BACKENDS = {
    "gloo": "one process for each rank on this machine, joined by gloo",
    "sim": "all ranks in one process (not there yet)",
    "nccl": "one GPU for each rank (not there yet)",
}

# Imported once, before the ranks are forked. The last is what torch itself imports, at a cost of a quarter of
# a second, in the first call of an autograd function: without it the first example of every new rank looks
# like a hang.
PRELOAD = ("torch", "ring", "verification.execute", "torch.fx.experimental.symbolic_shapes")
WARM_UP_PATIENCE = 60.0

Task = Callable[..., Any]  # (transport, case, *arguments) -> what the rank answers
Preparation = Callable[[], object]  # run once in every rank before its first task: how a defect is planted


class Unavailable(Exception):
    """The run cannot be carried out: a backend that is not there, or ranks that do not start."""


class Backend(Protocol):
    """One set of ranks at a time. Between `start` and `close`, tasks one after the other."""

    name: str
    patience: float  # seconds that a task may take before it counts as a hang

    def start(self, world: int) -> None:
        """Have so many ranks ready, instead of those there were. Raises Unavailable."""
        ...

    def submit(self, task: Task, case: Case, *arguments: Any) -> None:
        """Start a task on every rank of the Case's group; returns at once."""
        ...

    def collect(self) -> list[Any]:
        """What each rank of the Case's group answered, in the group's order. Raises a `VerificationFailure`
        where a rank crashed, hung or raised; the next `submit` then meets ranks as good as new."""
        ...

    def close(self) -> None: ...


class GlooBackend:
    """Persistent ranks on this machine: `verification.pool`."""

    name = "gloo"

    def __init__(self, patience: float = 10.0, prepare: Preparation | None = None) -> None:
        self.patience = patience
        self._prepare = prepare
        self._pool: Pool | None = None
        self._warm: int | None = None  # the generation of ranks that was prepared
        self._under_way: tuple[Ticket, Case] | None = None

    def start(self, world: int) -> None:
        self.close()
        try:
            self._pool = Pool(world, timeout=self.patience, preload=PRELOAD)
        except PoolError as error:
            raise Unavailable(f"the {world} ranks could not be started: {error}") from error

    def submit(self, task: Task, case: Case, *arguments: Any) -> None:
        assert self._pool is not None and case.world == self._pool.world_size
        if self._pool.generation != self._warm:  # new ranks are not held to the patience that used ones have earned
            try:
                self._pool.run(warm_up, self._prepare, timeout=WARM_UP_PATIENCE)
            except (RankFailure, PoolError) as error:
                raise Unavailable(f"the ranks could not be prepared: {error}") from error
            self._warm = self._pool.generation
        self._under_way = self._pool.submit(work, task, case, arguments), case

    def collect(self) -> list[Any]:
        assert self._pool is not None and self._under_way is not None
        ticket, case = self._under_way
        self._under_way = None
        try:
            answers = self._pool.collect(ticket, timeout=self.patience)
        except PoolError as error:
            raise Unavailable(str(error)) from error
        return [answers[rank] for rank in case.ranks]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = self._warm = None


def open_backend(name: str) -> Backend:
    """Raises Unavailable for a name that stands for no backend yet."""
    if name != "gloo":
        raise Unavailable(f"argument --backend: {name} is not there yet; use gloo")
    return GlooBackend()


def observe_on(backend: Backend, case: Case, *arguments: Any) -> list[Observation]:
    """`execute.observe` on every rank of the group, in the group's order."""
    backend.submit(observe, case, *arguments)
    return backend.collect()


def warm_up(prepare: Preparation | None) -> None:
    """What new ranks are called with first. Nothing of `ring` runs here: whatever is wrong with it is for
    examples to find.
    """
    if prepare is not None:
        prepare()


def work(task: Task, case: Case, arguments: tuple[Any, ...]) -> Any:
    """What a rank of the pool is called with. Ranks outside the group take no part, and answer None."""
    transport = _transport(case)
    return None if transport is None else task(transport, case, *arguments)


def _transport(case: Case) -> Transport | None:
    if case.world == 1:
        return SoloTransport()
    group = subgroup(case.ranks)  # by all ranks: making a group takes everyone
    return None if group is None else ProcessGroupTransport(group)
