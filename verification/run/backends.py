"""Where ranks run: one interface, behind it processes joined by gloo or NCCL, or a simulation.

A backend is given a *task*: a function of `verification.run.rank` that takes a `Transport` and a Case and does what one
rank does. `submit` starts it on every rank of the group, `collect` waits; in between, the parent computes what to
expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

import ring
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import SoloTransport, Transport
from verification.case import Case
from verification.failures import RankFailure
from verification.protocols import Example
from verification.run.cross_host import CrossHostTransport
from verification.run.observation import Observation
from verification.run.processes.pool import Pool, PoolError, Ticket
from verification.run.processes.rendezvous import subgroup
from verification.run.rank import observe, rank_device
from verification.run.simulation.eager_delivery import DeliveryPolicy
from verification.run.simulation.simulation import Simulation
from verification.wording import counted

BACKENDS = {
    "gloo": "one process for each rank on this machine, joined by gloo",
    "sim": "all ranks in one process, over a transport that does the worst its contract allows",
    "nccl": "one process and one GPU for each rank on this machine, joined by NCCL",
}

# Imported once, before the ranks are forked. torch itself imports the last two, which takes a second, in the first
# `requires_grad_` and in the first call of an autograd function: without them the first example of every new rank would
# look like a hang. They are named, not imported, so that this process does not spend that second.
PRELOAD = (torch.__name__, ring.__name__, observe.__module__, "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
WARM_UP_TIMEOUT = 180.0
RANKS_PER_TIMEOUT = 16  # simulated ones share a core
CASES_PER_APART = 8  # of which one has its ranks agree as on several machines

Task = Callable[..., Any]  # (transport, case, *arguments) -> what the rank answers
Preparation = Callable[[], object]  # run once in every rank before its first task: how a defect is planted


class Unavailable(Exception):
    """The run cannot be carried out: a backend that is not there, or ranks that do not start."""


class Backend(Protocol):
    """One set of ranks at a time, which run one task after the other between `start` and `close`."""

    name: str
    timeout: float  # seconds that a task may take before it counts as a hang
    prepare: Preparation | None  # set before `start`
    preload: tuple[str, ...]  # modules that ranks come with, set before `start`

    def start(self, world: int) -> None:
        """Have so many ranks ready, in place of those before. Raises Unavailable."""
        ...

    def submit(self, task: Task, case: Example, *arguments: Any) -> None:
        """Start a task on every rank of the Case's group; returns at once."""
        ...

    def collect(self) -> list[Any]:
        """What each rank of the Case's group answered, in the group's order. Raises a `VerificationFailure` where a
        rank crashed, hung or raised; the next `submit` then meets ranks as good as new."""
        ...

    def close(self) -> None: ...


class PoolBackend:
    """Processes of `verification.run.processes.pool`, kept alive from one task to the next."""

    name: str

    def __init__(
        self, timeout: float = 10.0, prepare: Preparation | None = None, preload: tuple[str, ...] = PRELOAD
    ) -> None:
        self.timeout = timeout
        self.last_words = 0.0  # seconds for the other ranks to say something where one died
        self.prepare = prepare
        self.preload = preload
        self._pool: Pool | None = None
        self._warm: int | None = None  # the generation of ranks that was prepared
        self._under_way: tuple[Ticket, Example] | None = None

    def open_pool(self, world: int, joined_by: str = "gloo") -> None:
        self.close()
        try:
            self._pool = Pool(world, timeout=self.timeout, preload=self.preload, joined_by=joined_by)
        except PoolError as error:
            raise Unavailable(f"the {counted(world, 'rank')} could not be started: {error}") from error

    def post(self, function: Callable[..., Any], task: Task, case: Example, arguments: tuple[Any, ...]) -> None:
        """Have `function(task, case, arguments)` called in every process."""
        self._under_way = self.prepared().submit(function, task, case, arguments), case

    def prepared(self) -> Pool:
        """The pool, its ranks warm. Raises Unavailable."""
        assert self._pool is not None
        if self._pool.generation != self._warm:
            try:  # new ranks are slower: the timeout may have been shortened for ranks that are warm
                self._pool.run(warm_up, self.prepare, timeout=WARM_UP_TIMEOUT)
            except (RankFailure, PoolError) as error:
                raise Unavailable(f"the ranks could not be prepared: {error}") from error
            self._warm = self._pool.generation
        return self._pool

    def answers(self, timeout: float) -> tuple[Example, list[Any]]:
        """The Case under way, and what each process answered."""
        assert self._pool is not None and self._under_way is not None
        ticket, case = self._under_way
        self._under_way = None
        try:
            return case, self._pool.collect(ticket, timeout=timeout, last_words=self.last_words)
        except PoolError as error:
            raise Unavailable(str(error)) from error

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = self._warm = None


class GlooBackend(PoolBackend):
    """One process for each rank on this machine."""

    name = "gloo"

    def start(self, world: int) -> None:
        self.open_pool(world)

    def submit(self, task: Task, case: Example, *arguments: Any) -> None:
        assert self._pool is not None and case.world == self._pool.world_size
        self.post(work, task, case, arguments)

    def collect(self) -> list[Any]:
        case, answers = self.answers(self.timeout)
        return [answers[rank] for rank in case.ranks]


class NcclBackend(GlooBackend):
    """One process and one GPU for each rank on this machine."""

    name = "nccl"

    def start(self, world: int) -> None:
        there = torch.cuda.device_count()
        if there < world:
            needed = f"{counted(world, 'GPU')} for {counted(world, 'rank')}"
            raise Unavailable(f"argument --backend: nccl needs {needed}, there are {there}")
        self.open_pool(world, "nccl")


class SimBackend(PoolBackend):
    """All ranks as threads of one process, over `verification.run.simulation.simulation`; Cases of any world size.

    The schedule follows from the Case's seed. A deadlock is found without waiting; `timeout` is for code that
    computes for ever. prompt: None, or how messages arrive in place of the worst that may be; what was received is then
    noted in it.
    """

    name = "sim"
    prompt: DeliveryPolicy | None = None

    def start(self, world: int) -> None:
        if self._pool is None:
            self.open_pool(1)

    def submit(self, task: Task, case: Example, *arguments: Any) -> None:
        self.post(simulate, task, case, (self.prompt, *arguments))

    def collect(self) -> list[Any]:
        assert self._under_way is not None
        world = self._under_way[1].world
        _, ((answer, prompt),) = self.answers(self.timeout * max(1.0, world / RANKS_PER_TIMEOUT))
        if self.prompt is not None:
            self.prompt.met.update(prompt.met)
        if isinstance(answer, RankFailure):
            raise answer
        return list(answer)


def open_backend(name: str) -> Backend:
    """The backend of that name in BACKENDS, not started."""
    return next(backend() for backend in (GlooBackend, SimBackend, NcclBackend) if backend.name == name)


def observe_on(backend: Backend, case: Case, *arguments: Any) -> list[Observation]:
    """`verification.run.rank.observe` on every rank of the group, in the group's order."""
    backend.submit(observe, case, *arguments)
    return backend.collect()


def warm_up(prepare: Preparation | None) -> None:
    """What new ranks are called with first. Nothing of `ring` runs here: examples are to find what is wrong with it."""
    if rank_device().type == "cuda":  # the first product loads libraries
        torch.ones(8, 8, device=rank_device()).mm(torch.ones(8, 8, device=rank_device())).sum().item()
    if prepare is not None:
        prepare()


def work(task: Task, case: Example, arguments: tuple[Any, ...]) -> Any:
    """What a rank of the pool is called with. Ranks outside the group take no part, and answer None."""
    transport = _transport(case)
    return None if transport is None else task(transport, case, *arguments)


def simulate(
    task: Task, case: Example, arguments: tuple[Any, ...]
) -> tuple[list[Any] | RankFailure, DeliveryPolicy | None]:
    """What the one process of a simulation is called with. The prompt, with which the arguments begin, comes back with
    what was received. A failure is returned, not raised: its states are kept."""
    prompt, *others = arguments
    simulation = Simulation(len(case.ranks), case.seed, case.ranks, prompt)
    try:
        return simulation.run(lambda transport: task(transport, case, *others)), prompt
    except RankFailure as failure:
        return failure, prompt


def _transport(case: Example) -> Transport | None:
    if case.world == 1:
        return SoloTransport()
    group = subgroup(case.ranks)  # called by all ranks: they make a group together
    if group is None:
        return None
    transport = transport_of(group)
    if type(transport) is ProcessGroupTransport and case.seed % CASES_PER_APART == 0:
        return CrossHostTransport(group)
    return transport
