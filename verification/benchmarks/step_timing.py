"""How long the steps of several ways take, measured by turns: a machine's clocks drift, and by turns that strikes all.

A step is forward and backward. `ms` is between two CUDA events around it, `wall_ms` until the GPU is done, `host_ms`
until the last call of forward and backward has returned, before the host waits for the GPU: what the host costs.
Gradients are not reduced.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verification.benchmarks.rank_group import RankGroup

T = TypeVar("T")
LONG = 32 * 2**10  # tokens of a rank from which a step takes so long that fewer are made
FEW = 3


@dataclass(frozen=True)
class Turns:
    """`warmup` steps of each way, then `rounds` times `steps` steps of each, way after way."""

    warmup: int = 8
    rounds: int = 3
    steps: int = 5

    def at(self, tokens: int) -> Turns:
        if tokens < LONG:
            return self
        return Turns(min(self.warmup, FEW), self.rounds, min(self.steps, FEW))


@dataclass(frozen=True)
class StepTime:
    """Milliseconds: the median of some steps, each number on the rank on which it is greatest."""

    ms: float
    wall_ms: float
    host_ms: float

    @classmethod
    def each(cls, taken: Callable[[Sequence[float]], float], times: Sequence[StepTime]) -> StepTime:
        """Of several one, number by number."""
        return cls(*(taken([getattr(x, name) for x in times]) for name in ("ms", "wall_ms", "host_ms")))


class Stepper:
    """One way's step, as it is timed. run: forward and backward. clear: what comes after it, which is not timed."""

    def __init__(
        self, run: Callable[[], object], inside: Callable[[], AbstractContextManager[Any]], clear: Callable[[], None]
    ) -> None:
        self._run, self._inside, self._clear = run, inside, clear

    def turn(self, ranks: RankGroup, steps: int) -> StepTime:
        """All ranks call it. Raises Failed, on every rank, where it failed on one."""

        def own() -> StepTime:
            with self._inside():
                return StepTime.each(statistics.median, [self._one(ranks.device) for _ in range(steps)])

        return StepTime.each(max, ranks.attempt(own))

    def peak(self, ranks: RankGroup) -> int | None:
        """Peak bytes of torch's allocator during a step, all that is held included, on the fullest rank."""
        if ranks.device.type != "cuda":
            return None

        def own() -> int:
            torch.cuda.synchronize(ranks.device)
            torch.cuda.reset_peak_memory_stats(ranks.device)
            with self._inside():
                self._one(ranks.device)
            return torch.cuda.max_memory_allocated(ranks.device)

        return max(ranks.attempt(own))

    def _one(self, device: torch.device) -> StepTime:
        """The ranks begin together."""
        on_gpu = device.type == "cuda"
        dist.all_reduce(torch.zeros(1, device=device))
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)
        _wait(device)
        started = time.perf_counter()
        if before is not None:
            before.record()
        self._run()
        if after is not None:
            after.record()
        launched = time.perf_counter()
        _wait(device)
        wall = 1000 * (time.perf_counter() - started)
        self._clear()
        ms = before.elapsed_time(after) if before is not None and after is not None else wall
        return StepTime(ms, wall, 1000 * (launched - started))


def by_turns(ranks: RankGroup, steppers: dict[str, Stepper], turns: Turns) -> dict[str, list[StepTime]]:
    """For each way the times of its rounds; the ways are warm already."""
    found: dict[str, list[StepTime]] = {name: [] for name in steppers}
    for _ in range(turns.rounds):
        for name, stepper in steppers.items():
            found[name].append(stepper.turn(ranks, turns.steps))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
