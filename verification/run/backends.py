"""The backends that run ranks, with one interface: processes joined by gloo or NCCL, or a simulation.

A backend runs a *task*: a function of a `Transport` and a Case that does the work of one rank, such as those of
`verification.run.rank`. `submit` starts it on every rank of the group, and `collect` waits for the results. In between,
the parent computes the expected ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

import ring
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import SoloTransport, Transport
from ring.compute.kernels import KERNELS
from verification.case import Case
from verification.failures import RankFailure
from verification.protocols import CaseLike
from verification.run.cross_host import CrossHostTransport
from verification.run.observation import Observation
from verification.run.pretended_hosts import make_group
from verification.run.processes.pool import Pool, PoolError, Ticket
from verification.run.rank import observe, rank_device
from verification.run.simulation.eager_delivery import DeliveryPolicy
from verification.run.simulation.simulation import Simulation
from verification.wording import counted

BACKENDS = {
    "gloo": "one process for each rank on this machine, joined by gloo",
    "sim": "all ranks in one process, over a transport that does the worst its contract allows",
    "nccl": "one process and one GPU for each rank on this machine, joined by NCCL",
}
MAX_RANKS = {"gloo": 64, "sim": 1024, "nccl": 64}  # by backend

# Imported once, before the ranks are forked. torch itself imports the last two, which takes a second, in the first
# `requires_grad_` and in the first call of an autograd function: without them the first example of a new rank would
# look like a hang. Name them, do not import them: this process need not spend that second.
PRELOAD = (torch.__name__, ring.__name__, observe.__module__, "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
WARM_UP_TIMEOUT = 180.0
COMPILE_TIMEOUT = 120.0  # seconds for an example: some kernels compile at the first call of each kind
RANKS_PER_TIMEOUT = 16  # simulated ranks share a core, so larger worlds get more time
CASES_PER_CROSS_HOST = 8  # in one Case of so many, ranks agree as on several machines

Task = Callable[..., Any]  # (transport, case, *arguments) -> the rank's answer
Preparation = Callable[[], object]  # run once in every rank before its first task; plants a defect, for instance


class Unavailable(Exception):
    """The run cannot be carried out: the backend is missing, or its ranks do not start."""


class Backend(Protocol):
    """One set of ranks at a time, which run one task after the other between `start` and `close`."""

    name: str
    device: str  # of the Cases: "cpu" or "cuda"
    timeout: float  # seconds after which a task counts as a hang
    prepare: Preparation | None  # set before `start`
    preload: tuple[str, ...]  # modules imported before the ranks are forked; set before `start`
    calls: str | None  # what failures say that the ranks were in; None: the name of the function
    earlier: list[Any]  # examples that these ranks ran (`PastExample` of `search.experiment`); new ranks, a new list

    def start(self, world: int) -> None:
        """Start so many ranks, in place of earlier ones. Raises Unavailable."""
        ...

    def submit(self, task: Task, case: CaseLike, *arguments: Any) -> None:
        """Start a task on every rank of the Case's group, and return without waiting."""
        ...

    def collect(self) -> list[Any]:
        """Return the answer of each rank of the Case's group, in the group's order.

        Raises a `VerificationFailure` if a rank crashed, hung or raised; the next `submit` then meets new ranks."""
        ...

    def beside(self, world: int) -> Backend:
        """Return so many ranks more, of this kind, which remain until these close. Raises Unavailable."""
        ...

    def close(self) -> None: ...


def safe_to_fork(preload: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules to preload. Where there are GPUs other imports, such as torch._inductor.lowering's or a
    user's, may initialise CUDA, which no process that is forked afterwards can use."""
    return PRELOAD if torch.cuda.is_available() else preload


class PoolBackend:
    """Processes of `verification.run.processes.pool`, reused from one task to the next."""

    name: str
    device = "cpu"
    calls: str | None = None

    def __init__(
        self, timeout: float = 10.0, prepare: Preparation | None = None, preload: tuple[str, ...] = PRELOAD
    ) -> None:
        self.timeout = timeout
        self.last_words = 0.0  # seconds for the other ranks to answer or raise after one died
        self.prepare = prepare
        self.preload = preload
        self._pool: Pool | None = None
        self._warm: int | None = None  # the generation of ranks that was prepared
        self._under_way: tuple[Ticket, CaseLike] | None = None
        self.earlier: list[Any] = []
        self._beside: dict[int, Backend] = {}  # by the number of ranks

    def open_pool(self, world: int, joined_by: str = "gloo") -> None:
        self.close()
        try:
            self._pool = Pool(world, timeout=self.timeout, preload=safe_to_fork(self.preload), joined_by=joined_by)
        except PoolError as error:
            raise Unavailable(f"the {counted(world, 'rank')} could not be started: {error}") from error

    def post(self, function: Callable[..., Any], task: Task, case: CaseLike, arguments: tuple[Any, ...]) -> None:
        """Call `function(task, case, arguments)` in every process."""
        ticket = self.prepared().submit(function, task, case, arguments)
        self._under_way = replace(ticket, name=self.calls or ticket.name), case

    def prepared(self) -> Pool:
        """Return the pool with its ranks warmed up. Raises Unavailable."""
        assert self._pool is not None
        if self._pool.generation != self._warm:
            try:  # new ranks are slower: do not use the timeout, which may be short, for warm ranks
                self._pool.run(warm_up, self.prepare, timeout=WARM_UP_TIMEOUT)
            except (RankFailure, PoolError) as error:
                raise Unavailable(f"the ranks could not be prepared: {error}") from error
            self._warm = self._pool.generation
        return self._pool

    def answers(self, timeout: float) -> tuple[CaseLike, list[Any]]:
        """Return the Case under way, and each process's answer."""
        assert self._pool is not None and self._under_way is not None
        ticket, case = self._under_way
        self._under_way = None
        try:
            return case, self._pool.collect(ticket, timeout=timeout, last_words=self.last_words)
        except PoolError as error:
            raise Unavailable(str(error)) from error
        except RankFailure:  # the pool replaces all ranks
            self.earlier = []
            raise

    def close(self) -> None:
        self.earlier = []
        if self._pool is not None:
            self._pool.close()
            self._pool = self._warm = None
        for other in self._beside.values():
            other.close()
        self._beside.clear()


class GlooBackend(PoolBackend):
    """One process for each rank on this machine."""

    name = "gloo"

    def start(self, world: int) -> None:
        self.open_pool(world)

    def submit(self, task: Task, case: CaseLike, *arguments: Any) -> None:
        assert self._pool is not None and case.world == self._pool.world_size
        self.post(work, task, case, arguments)

    def collect(self) -> list[Any]:
        case, answers = self.answers(self.timeout)
        return [answers[rank] for rank in case.ranks]

    def beside(self, world: int) -> Backend:
        other = self._beside.get(world)
        if other is None:
            other = type(self)(self.timeout, self.prepare, self.preload)
            other.start(world)
            self._beside[world] = other
        other.timeout = self.timeout
        return other


def need_gpus(world: int) -> None:
    """Raise Unavailable unless this machine has a GPU for each rank."""
    gpus = torch.cuda.device_count()
    if gpus < world:
        needed = f"{counted(world, 'GPU')} for {counted(world, 'rank')}"
        raise Unavailable(f"argument --backend: nccl needs {needed}, there are {gpus}")


class NcclBackend(GlooBackend):
    """One process and one GPU for each rank on this machine."""

    name = "nccl"
    device = "cuda"

    def start(self, world: int) -> None:
        need_gpus(world)
        if any(kernel.compiles and kernel.missing() is None for kernel in KERNELS):
            self.timeout = max(self.timeout, COMPILE_TIMEOUT)
        self.open_pool(world, "nccl")


class SimBackend(PoolBackend):
    """All ranks as threads of one process, over `verification.run.simulation.simulation`; Cases of any world size.

    The Case's seed and hosts determine the schedule. A deadlock is found without waiting; `timeout` is for code that
    computes for ever. delivery: None for the worst delivery that is allowed, or a policy, in which received messages
    are noted.
    """

    name = "sim"
    delivery: DeliveryPolicy | None = None

    def start(self, world: int) -> None:
        if self._pool is None:
            self.open_pool(1)

    def submit(self, task: Task, case: CaseLike, *arguments: Any) -> None:
        self.post(simulate, task, case, (self.delivery, *arguments))

    def beside(self, world: int) -> Backend:
        return self  # a simulation takes Cases of any world size

    def collect(self) -> list[Any]:
        assert self._under_way is not None
        world = self._under_way[1].world
        _, ((answer, delivery),) = self.answers(self.timeout * max(1.0, world / RANKS_PER_TIMEOUT))
        if self.delivery is not None:
            self.delivery.received.update(delivery.received)
        if isinstance(answer, RankFailure):
            raise answer
        return list(answer)


def open_backend(name: str) -> Backend:
    """Make the backend of that name in BACKENDS, without starting it."""
    return next(backend() for backend in (GlooBackend, SimBackend, NcclBackend) if backend.name == name)


def observe_on(backend: Backend, case: Case, *arguments: Any) -> list[Observation]:
    """Run `verification.run.rank.observe` on every rank of the group; Observations in the group's order."""
    backend.submit(observe, case, *arguments)
    return backend.collect()


def warm_up(prepare: Preparation | None) -> None:
    """Prepare a new rank. Run nothing of `ring` here: its errors must show in an example."""
    if rank_device().type == "cuda":  # the first product loads libraries
        torch.ones(8, 8, device=rank_device()).mm(torch.ones(8, 8, device=rank_device())).sum().item()
    if prepare is not None:
        prepare()


def work(task: Task, case: CaseLike, arguments: tuple[Any, ...]) -> Any:
    """Run the task on a rank of the pool. Ranks outside the group do nothing and answer None."""
    transport = _transport(case)
    return None if transport is None else task(transport, case, *arguments)


def simulate(
    task: Task, case: Case, arguments: tuple[Any, ...]
) -> tuple[list[Any] | RankFailure, DeliveryPolicy | None]:
    """Simulate all ranks in one process. The first argument is the delivery policy; it is returned with the messages
    noted. A failure is returned, not raised, to keep its states."""
    delivery, *others = arguments
    simulation = Simulation(len(case.ranks), case.seed, case.ranks, delivery, case.hosts)
    try:
        return simulation.run(lambda transport: task(transport, case, *others)), delivery
    except RankFailure as failure:
        return failure, delivery


def _transport(case: CaseLike) -> Transport | None:
    if case.world == 1:
        return SoloTransport()
    group = make_group(case)  # collective: all ranks call it
    if group is None:
        return None
    transport = transport_of(group)
    if type(transport) is ProcessGroupTransport and case.seed % CASES_PER_CROSS_HOST == 0:
        return CrossHostTransport(group)
    return transport
