"""A step of a way: comparison with exact losses and gradients, then timing.

The exact step has fp32 parameters and the dense fp64 attention of `reference`. The error of 16 bits is measured on one
GPU, with torch's attention in eager mode. Relative to the norm it must be at most `sqrt(roundings) u`, for as many
independent roundings on the longest path, with u half a last place. Another order of the same roundings gives a similar
error; a way with more than MOST times that error is wrong.

Steps of several ways are interleaved, so that clock drift affects all equally. A step is forward and backward, without
a reduction of gradients. `ms` is between two CUDA events around it, `wall_ms` until the GPU has finished, `host_ms`
until forward and backward have returned, before the host waits for the GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.rank_group import RankGroup
from bench.step_models import StepModel
from bench.step_ways import ALONE, StepProblem, Way, way_of
from bench.workload import Attend
from ring.nn import gather
from verification.models.formulas import oracle_attention

MOST = 2.0
ROUNDINGS = 32  # of a layer, forward and backward: products, norms, rotations, gate and sums
LONG = 32 * 2**10  # tokens per rank from which turns have only FEW steps
FEW = 3


def step(model: Any, way: Way) -> Tensor:
    """Run forward and backward of this rank's part of the mean loss over all labelled tokens, gradients not reduced.
    Return the tokens' losses, (1, N). model: a StepModel, compiled or not."""
    losses: Tensor = model(way.batch.tokens, way.batch.labels, way.context, way.attend)
    (losses.sum() / (way.context.layout.n - 1)).backward()
    return losses.detach()


# --- comparison -------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A way gives wrong results; the message has the error. The same on every rank."""


@dataclass(frozen=True)
class Deviation:
    """Relative errors in norm: of all tokens' losses; of all parameters' gradients, summed over ranks."""

    losses: float
    gradients: float


class Exact:
    """Exact losses, (1, n), and gradients of a problem, and the deviation of one GPU by rounding.

    The model's gradients must be None, and are None afterwards. Raises Failed on every rank if one fails, and Wrong if
    rounding does not explain the deviation of one GPU.
    """

    losses: Tensor
    gradients: list[Tensor]  # in the order of the model's parameters

    def __init__(self, ranks: RankGroup, model: StepModel, problem: StepProblem) -> None:
        self._ranks = ranks
        alone = way_of(ALONE, problem)
        ranks.attempt(lambda: self._compute(model, dataclasses.replace(alone, attend=_oracle(problem))))

        def rounded() -> Deviation:
            with alone.inside():
                return self._off(step(model, alone), model, alone)

        self.rounding = self._largest(rounded)
        model.zero_grad()
        most = math.sqrt(ROUNDINGS * problem.shape.layers) * torch.finfo(problem.workload.dtype).eps / 2
        if not max(self.rounding.losses, self.rounding.gradients) <= most:
            raise Wrong(f"one GPU is off by {self.rounding}, of which rounding explains {most:.1e}")

    def off(self, losses: Tensor, model: StepModel, way: Way) -> Deviation:
        """Return the largest deviation of a step that all ranks have just made. Collective. Raises Wrong if rounding
        does not explain it."""
        deviation = self._largest(lambda: self._off(losses, model, way))
        for what in ("losses", "gradients") if way.exact else ("losses",):
            error, rounding = getattr(deviation, what), getattr(self.rounding, what)
            if not error <= MOST * rounding:  # also if it is NaN
                raise Wrong(f"{what} are off by {error:.1e} of their norm, one GPU's by rounding {rounding:.1e}")
        return deviation

    def _compute(self, model: StepModel, way: Way) -> None:
        wide = copy.deepcopy(model).float()
        self.losses = step(wide, way)
        self.gradients = [_grad(parameter) for parameter in wide.parameters()]

    def _off(self, losses: Tensor, model: StepModel, way: Way) -> Deviation:
        whole = gather(way.context, losses)
        squares = torch.zeros(2, dtype=torch.float64, device=losses.device)
        for parameter, exact in zip(model.parameters(), self.gradients, strict=True):
            grad = _grad(parameter)
            if not way.alone:
                dist.all_reduce(grad)
            squares += torch.stack([(grad - exact).double().square().sum(), exact.double().square().sum()])
        distance, norm = squares.sqrt().tolist()
        return Deviation(float((whole - self.losses).double().norm() / self.losses.double().norm()), distance / norm)

    def _largest(self, own: Callable[[], Deviation]) -> Deviation:
        everyone = self._ranks.attempt(own)
        return Deviation(max(x.losses for x in everyone), max(x.gradients for x in everyone))


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.float()  # a copy if it has 16 bits


def _oracle(problem: StepProblem) -> Attend:
    pattern = problem.workload.pattern
    return lambda q, k, v: oracle_attention(q, k, v, pattern)[0].to(q.dtype)


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """`warmup` steps of each way, then `rounds` rounds with a turn of `steps` steps of each way."""

    warmup: int = 8
    rounds: int = 3
    steps: int = 5

    def at(self, tokens: int) -> Turns:
        if tokens < LONG:
            return self
        return Turns(min(self.warmup, FEW), self.rounds, min(self.steps, FEW))


@dataclass(frozen=True)
class StepTime:
    """Medians of some steps in milliseconds, each on its slowest rank."""

    ms: float
    wall_ms: float
    host_ms: float

    @classmethod
    def each(cls, reduce: Callable[[Sequence[float]], float], times: Sequence[StepTime]) -> StepTime:
        """Reduce each field of several times."""
        return cls(*(reduce([getattr(x, name) for x in times]) for name in ("ms", "wall_ms", "host_ms")))


@dataclass(frozen=True)
class Stepper:
    """Step of one way. run: forward and backward. clear: called after it, not timed."""

    run: Callable[[], object]
    inside: Callable[[], AbstractContextManager[Any]]
    clear: Callable[[], None]

    def turn(self, ranks: RankGroup, steps: int) -> StepTime:
        """Time a turn. Collective. Raises Failed on every rank if it fails on one."""

        def own() -> StepTime:
            with self.inside():
                return StepTime.each(statistics.median, [self._one(ranks.device) for _ in range(steps)])

        return StepTime.each(max, ranks.attempt(own))

    def peak(self, ranks: RankGroup) -> int | None:
        """Return the total peak bytes of torch's allocator in a step, on the fullest rank."""
        if ranks.device.type != "cuda":
            return None

        def own() -> int:
            torch.cuda.synchronize(ranks.device)
            torch.cuda.reset_peak_memory_stats(ranks.device)
            with self.inside():
                self._one(ranks.device)
            return torch.cuda.max_memory_allocated(ranks.device)

        return max(ranks.attempt(own))

    def _one(self, device: torch.device) -> StepTime:
        """Time one step, which the ranks start together."""
        on_gpu = device.type == "cuda"
        dist.all_reduce(torch.zeros(1, device=device))
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)
        _wait(device)
        started = time.perf_counter()
        if before is not None:
            before.record()
        self.run()
        if after is not None:
            after.record()
        launched = time.perf_counter()
        _wait(device)
        wall = 1000 * (time.perf_counter() - started)
        self.clear()
        ms = before.elapsed_time(after) if before is not None and after is not None else wall
        return StepTime(ms, wall, 1000 * (launched - started))


def by_turns(ranks: RankGroup, steppers: dict[str, Stepper], turns: Turns) -> dict[str, list[StepTime]]:
    """Time all rounds, way after way in each, and return each way's times. The ways are warm already."""
    times: dict[str, list[StepTime]] = {name: [] for name in steppers}
    for _ in range(turns.rounds):
        for name, stepper in steppers.items():
            times[name].append(stepper.turn(ranks, turns.steps))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
