"""One model in one mode at one size: every way's step is checked, warmed up and timed by turns; the rows of the record.

All ways of a section share one model's parameters. A way that cannot run has a row that says why; one that computes
something else has a row, is not timed, and makes the run fail.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from verification.benchmarks.baselines import Impossible
from verification.benchmarks.rank_group import Failed, Lost, RankGroup
from verification.benchmarks.results import BenchRecord
from verification.benchmarks.step_check import Exact, Wrong, step
from verification.benchmarks.step_models import SHAPES, made
from verification.benchmarks.step_timing import Stepper, StepTime, Turns, by_turns
from verification.benchmarks.step_ways import ALONE, OURS, PEERS, UNCHECKED, StepProblem, Way, made_ways, names_of

MODES = ("eager", "compiled")
BACKENDS = {"cuda": "inductor", "cpu": "aot_eager"}  # C++ for the processor takes minutes to compile
GRAPHS = 64  # of one function: each way, and each part between two breaks, has its own


@dataclass(frozen=True)
class StepOptions:
    """tokens: of each rank. ways: of all kinds of models. minutes: after which no section begins."""

    kinds: tuple[str, ...]
    modes: tuple[str, ...]
    tokens: tuple[int, ...]
    ways: tuple[str, ...]
    turns: Turns
    minutes: float


class StepBench:
    """One run. Every rank makes the same steps in the same order. wrong: what computed something else, by model, mode
    and way, and by how much."""

    def __init__(self, ranks: RankGroup, options: StepOptions, record: BenchRecord) -> None:
        self.ranks, self.options, self.record = ranks, options, record
        self.wrong: dict[tuple[str, str, str], str] = {}
        self._began = time.monotonic()

    def run(self) -> None:
        with torch._dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
            for mode in self.options.modes:
                for kind in self.options.kinds:
                    for tokens in sorted(self.options.tokens):
                        self._section(kind, mode, tokens)

    def _section(self, kind: str, mode: str, tokens: int) -> None:
        head = {"model": kind, "mode": mode, "tokens": tokens}
        minutes = max(self.ranks.gathered((time.monotonic() - self._began) / 60))
        if minutes > self.options.minutes:
            self.record.add(**head, left_out=f"the run had taken {minutes:.1f} minutes")
            return
        ranks = self.ranks
        problem = StepProblem(kind, SHAPES[ranks.device.type], tokens, ranks.rank, ranks.world, ranks.device)
        before = {name: reason for (*where, name), reason in self.wrong.items() if where == [kind, mode]}
        rows = StepSection(ranks, problem, mode, self.options).rows(before)
        for name, row in rows.items():
            self.record.add(**head, way=name, **row)
            if "wrong" in row:
                self.wrong[kind, mode, name] = row["wrong"]
        torch._dynamo.reset()  # with all that graphs hold
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


class StepSection:
    """The ways of one model in one mode at one size, which share its parameters."""

    def __init__(self, ranks: RankGroup, problem: StepProblem, mode: str, options: StepOptions) -> None:
        self.ranks, self.problem, self.compiled, self.options = ranks, problem, mode == "compiled", options
        self.model = made(problem.kind, problem.shape, ranks.device, problem.workload.dtype)
        self.turns = options.turns.at(problem.tokens)

    def rows(self, wrong: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Of each way. wrong: those that are not timed, since they were wrong at a smaller size, and why.

        Raises Failed, on every rank, for what no single way can help, and Lost where ranks were left waiting.
        """
        found: dict[str, dict[str, Any]] = {name: {"wrong": reason} for name, reason in wrong.items()}
        ready: dict[str, Stepper] = {}
        wanted = set(self.options.ways) - set(wrong)
        names = tuple(name for name in names_of(self.problem.kind) if name in wanted)
        try:
            exact = self._exact()
        except Wrong as reason:  # of what all ways are compared with
            return {name: {"wrong": str(reason)} for name in names}
        for name, way in made_ways(names, self.problem):
            if isinstance(way, Impossible):
                found[name] = {"left_out": str(way)}
                continue
            try:
                found[name], ready[name] = self._begun(way, exact)
            except Wrong as reason:
                found[name] = {"wrong": str(reason)}
            except Failed as failure:
                found[name] = {"error": str(failure)}
                if not way.alone and (failure.memory or not failure.everywhere):
                    raise Lost(f"{name} with {self.problem.tokens} tokens a rank: {failure}") from failure
            self.model.zero_grad()
        del exact  # before memory is looked at
        for name, stepper in ready.items():
            stepper.turn(self.ranks, max(1, self.turns.warmup - 1))
            found[name]["peak_bytes"] = stepper.peak(self.ranks)
        for name, rounds in by_turns(self.ranks, ready, self.turns).items():
            found[name] |= of_rounds(rounds, self.turns)
        compare(found, self.problem)
        return found

    def _exact(self) -> Exact | None:
        """At the smallest size only: it is dense."""
        if self.problem.tokens != min(self.options.tokens):
            return None
        return Exact(self.ranks, self.model, self.problem)

    def _begun(self, way: Way, exact: Exact | None) -> tuple[dict[str, Any], Stepper]:
        """The way's first step, in which it is compiled, and the check. Raises Failed and Wrong, on every rank."""
        run: Any = self.model
        if self.compiled:
            backend = BACKENDS[self.ranks.device.type]
            run = torch.compile(self.model, fullgraph=way.whole, dynamic=False, backend=backend)
        losses: list[Tensor] = []

        def first() -> tuple[float, float]:
            started = time.perf_counter()
            with way.inside():
                losses.append(step(run, way))
            return losses[0].double().sum().item(), time.perf_counter() - started

        everyone = self.ranks.attempt(first)
        total = everyone[0][0] if way.alone else sum(own for own, _ in everyone)
        row: dict[str, Any] = {"loss": total / (way.context.layout.n - 1)}
        row["first_seconds"] = max(seconds for _, seconds in everyone)
        if exact is not None:
            off = exact.off(losses[0], self.model, way)
            exact.refuse(way, off)
            row |= {"losses_off": off.losses, "gradients_off": off.gradients}
            row |= {"rounding_losses": exact.rounding.losses, "rounding_gradients": exact.rounding.gradients}
        return row, Stepper(lambda: step(run, way), way.inside, self.model.zero_grad)


def of_rounds(rounds: list[StepTime], turns: Turns) -> dict[str, Any]:
    """The medians over the rounds, and the rounds."""
    middle: dict[str, Any] = asdict(StepTime.each(statistics.median, rounds))
    return middle | {"rounds": [asdict(one) for one in rounds], "warmup": turns.warmup, "steps": turns.steps}


def compare(rows: dict[str, dict[str, Any]], problem: StepProblem) -> None:
    """Adds what follows from several rows: the ceiling, and ours beside the fastest of the peers."""
    timed = {name: row for name, row in rows.items() if "ms" in row}
    peers = [name for name in PEERS[problem.kind] if name in timed]
    best = min(peers, key=lambda name: float(timed[name]["ms"]), default=None)
    for name, row in timed.items():
        if ALONE in timed:
            row["efficiency"] = timed[ALONE]["ms"] / problem.world / row["ms"]
        if name in (OURS, UNCHECKED) and best is not None:
            row |= {"best_peer": best, "of_best_peer": row["ms"] / timed[best]["ms"]}
