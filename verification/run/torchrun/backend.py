"""The backend on the processes that torchrun started: rank 0 draws and judges, each agent runs one rank.

Failures are shrunk in the simulation. Ranks that crashed or hung are named, shown and replaced. Only the loss of a
process that torchrun itself started ends the run, with `AgentLost`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from verification.failures import name_ranks
from verification.protocols import CaseLike
from verification.run.backends import PRELOAD, GlooBackend, Preparation, SimBackend, Task, Unavailable
from verification.run.processes.pool import START_TIMEOUT, Pool, PoolError, RankSet
from verification.run.processes.rendezvous import Rendezvous
from verification.run.processes.worker import LOOK_EVERY, LOOKS, RECORD_TIMEOUT, STACK_TIMEOUT
from verification.run.torchrun.agents import SILENCE, Orders
from verification.run.torchrun.rank_zero import SLACK, Agents
from verification.wording import counted


class AgentRanks:
    """The ranks of the first `world_size` agents: a `verification.run.processes.pool.RankSet`."""

    def __init__(self, agents: Agents, world_size: int, timeout: float, joined_by: str) -> None:
        self.world_size = world_size
        self._agents, self._timeout, self._joined_by = agents, timeout, joined_by
        self._all = range(world_size)
        self.pids: tuple[int, ...] = ()

    def start(self) -> None:
        agents, address = self._agents, self._agents.address
        agents.renew()
        agents.ask_all(self._all, "ping", None, SILENCE)  # the start of a rank may take long, a ping may not
        prefix = f"verification/generation {agents.generation}"
        rendezvous = Rendezvous(host=address.host, port=address.port, prefix=prefix)
        orders = Orders(
            agents.generation, self.world_size, rendezvous, PRELOAD, self._joined_by, agents.one_machine, self._timeout
        )
        started = agents.ask(self._all, "start", orders, START_TIMEOUT)
        for rank in self._all:
            _, error = started.get(rank, (0, f"its process gave no answer in {START_TIMEOUT:.0f} s"))
            if error:
                raise PoolError(f"rank {rank}: {error}")
        self.pids = tuple(started[rank][0] for rank in self._all)

    def send(self, messages: Sequence[bytes]) -> None:
        self._agents.send(self._all, "call", self._agents.generation, messages)

    def events(self, timeout: float) -> list[tuple[int, bool]]:
        """Return answers before deaths; a death is reported by every call, as by `Ranks.events`."""
        self._agents.pump(0.0)
        if not self._events():
            self._agents.pump(timeout)
        return self._events()

    def _events(self) -> list[tuple[int, bool]]:
        answered = [(rank, False) for rank in self._all if self._agents.answers[rank]]
        return answered + [(rank, True) for rank in self._all if self.is_dead(rank)]

    def receive(self, rank: int) -> tuple[int, int, bytes] | None:
        answers = self._agents.answers[rank]
        return answers.popleft() if answers else None

    def has_answer(self, rank: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._agents.pump(0.0)
        while not self._agents.answers[rank] and rank not in self._agents.exits:
            if (remaining := deadline - time.monotonic()) <= 0:
                return False
            self._agents.pump(remaining)
        return True

    def is_dead(self, rank: int) -> bool:
        return rank in self._agents.exits

    def exit_code(self, rank: int) -> int | None:
        return self._agents.exits.get(rank)

    def stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """Return the stacks of these ranks. Raises AgentLost for an agent that does not answer."""
        return self._agents.ask_all(ranks, "stacks", None, max(SILENCE, STACK_TIMEOUT + SLACK)) if ranks else {}

    def records(self, ranks: Collection[int]) -> dict[int, bytes]:
        """Return the flight records of these ranks, without those that do not answer in time. Raises AgentLost."""
        replies = self._agents.ask(ranks, "records", None, RECORD_TIMEOUT + SLACK)
        return {rank: record for rank, record in replies.items() if record is not None}

    def any_runnable(self, ranks: Collection[int]) -> bool:
        """True if any of these ranks is runnable. Raises AgentLost for an agent that does not answer.

        Always False on GPUs: a process that waits for a GPU spins, and would look as if it computed.
        """
        if self._joined_by == "nccl":
            return False
        return any(self._agents.ask_all(ranks, "any runnable", None, max(SILENCE, LOOKS * LOOK_EVERY + SLACK)).values())

    def end(self) -> None:
        if not self._agents.ending:  # otherwise they are ending already, or cannot be reached
            self._agents.ask(self._all, "end", None, SLACK + STACK_TIMEOUT)


class TorchrunPool(Pool):
    """A pool whose ranks are run by the agents."""

    def __init__(self, agents: Agents, world_size: int, *, timeout: float, joined_by: str) -> None:
        self._agents = agents
        super().__init__(world_size, timeout=timeout, preload=PRELOAD, joined_by=joined_by, flight_records=True)

    def _new_ranks(self) -> RankSet:
        return AgentRanks(self._agents, self.world_size, self.timeout, self._joined_by)


class ShrinkBackend(SimBackend):
    """A simulation that raises AgentLost as soon as an agent is lost."""

    def __init__(self, agents: Agents, prepare: Preparation | None) -> None:
        super().__init__(prepare=prepare)
        self._agents = agents

    def submit(self, task: Task, case: CaseLike, *arguments: Any) -> None:
        self._agents.raise_pending()
        super().submit(task, case, *arguments)


class TorchrunBackend(GlooBackend):
    """The ranks of the first agents, or of all. name: their process group's backend, "gloo" or "nccl"."""

    def __init__(self, agents: Agents, name: str, timeout: float, prepare: Preparation | None = None) -> None:
        super().__init__(timeout, prepare)
        self.name = name
        self.device = "cuda" if name == "nccl" else "cpu"
        self.agents = agents
        self.last: CaseLike | dict[str, Any] | None = None  # submitted last: a Case, or the record of another problem

    def start(self, world: int) -> None:
        """Have so many ranks ready; a healthy pool of that size is reused."""
        started = self.agents.address.world_size
        if world > started:
            raise Unavailable(f"{world} ranks are needed, torchrun started {started}: --nproc-per-node={world}")
        if self.name == "nccl":
            agents = [self.agents.hellos[rank] for rank in range(world)]
            without = [agent.rank for agent in agents if agent.gpus <= agent.local_rank]
            if without:
                hint = "NCCL needs one for each rank; on CPUs: --backend gloo"
                raise Unavailable(f"there is no GPU for {name_ranks(without)}: {hint}")
        if self._pool is None or self._pool.world_size != world:
            self.close()
            try:
                self._pool = TorchrunPool(self.agents, world, timeout=self.timeout, joined_by=self.name)
            except PoolError as error:
                raise Unavailable(f"the {counted(world, 'rank')} could not be started: {error}") from error

    def submit(self, task: Task, case: CaseLike, *arguments: Any) -> None:
        self.last = case
        super().submit(task, case, *arguments)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]:
        """Call `function(*arguments)` in every rank; return each result. Raises the same errors as `collect`."""
        try:
            return self.prepared().run(function, *arguments, timeout=timeout)
        except PoolError as error:
            raise Unavailable(str(error)) from error
