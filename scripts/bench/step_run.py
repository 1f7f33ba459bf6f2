"""A step of a way: checked against exact losses and gradients, then timed.

The exact step has the model's parameters in fp32 and the dense attention of `reference`, in fp64. How far 16 bits are
from that is what one GPU shows, by torch's attention eagerly: its rounding is at most `sqrt(roundings) u` in relation
to the norm, for as many independent roundings on the longest path, u being half a last place. Another order of the same
kind of roundings adds up to about as much; a way that is off by more than MOST times that is wrong.

Steps of several ways are timed by turns: a machine's clocks drift, and by turns that strikes all. A step is forward and
backward. `ms` is between two CUDA events around it, `wall_ms` until the GPU is done, `host_ms` until the last call of
forward and backward has returned, before the host waits for the GPU: what the host costs. Gradients are not reduced.
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
from reference import Pattern, attention, gradients
from ring.nn import gather

MOST = 2.0
ROUNDINGS = 32  # of a layer, forward and backward: its products, norms, turns, the gate and the sums
LONG = 32 * 2**10  # tokens of a rank from which a step takes so long that fewer are made
FEW = 3


def step(model: Any, way: Way) -> Tensor:
    """Forward and backward of the mean over all labelled tokens of all ranks: this rank's summand, and its gradients,
    which are not summed. Returns the tokens' losses, (1, N). model: a StepModel, or one that is compiled."""
    losses: Tensor = model(way.batch.tokens, way.batch.labels, way.context, way.attend)
    (losses.sum() / (way.context.layout.n - 1)).backward()
    return losses.detach()


# --- checked ----------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A way computes something else; the message says by how much. The same on every rank."""


@dataclass(frozen=True)
class Off:
    """Norms of differences over norms: of all tokens' losses; of all parameters' gradients, summed over ranks."""

    losses: float
    gradients: float


class Exact:
    """The exact losses, (1, n), and gradients of a problem, and how far those of one GPU are from them.

    The model's gradients must be None, and are so afterwards. Raises Failed, on every rank, where it failed on one, and
    Wrong where one GPU is further off than by rounding.
    """

    losses: Tensor
    gradients: list[Tensor]  # in the order of the model's parameters

    def __init__(self, ranks: RankGroup, model: StepModel, problem: StepProblem) -> None:
        self._ranks = ranks
        alone = way_of(ALONE, problem)
        ranks.attempt(lambda: self._compute(model, dataclasses.replace(alone, attend=_oracle(problem))))

        def rounded() -> Off:
            with alone.inside():
                return self._off(step(model, alone), model, alone)

        self.rounding = self._greatest(rounded)
        model.zero_grad()
        most = math.sqrt(ROUNDINGS * problem.shape.layers) * torch.finfo(problem.workload.dtype).eps / 2
        if not max(self.rounding.losses, self.rounding.gradients) <= most:
            raise Wrong(f"one GPU is off by {self.rounding}, of which rounding explains {most:.1e}")

    def off(self, losses: Tensor, model: StepModel, way: Way) -> Off:
        """How far a step is off that all ranks have just made, on the rank where that is most. All ranks call it.
        Raises Wrong where rounding does not explain it."""
        off = self._greatest(lambda: self._off(losses, model, way))
        for what in ("losses", "gradients") if way.exact else ("losses",):
            found, rounding = getattr(off, what), getattr(self.rounding, what)
            if not found <= MOST * rounding:  # NaN neither
                raise Wrong(f"{what} are off by {found:.1e} of their norm, one GPU's by rounding {rounding:.1e}")
        return off

    def _compute(self, model: StepModel, way: Way) -> None:
        wide = copy.deepcopy(model).float()
        self.losses = step(wide, way)
        self.gradients = [_grad(parameter) for parameter in wide.parameters()]

    def _off(self, losses: Tensor, model: StepModel, way: Way) -> Off:
        whole = gather(way.context, losses)
        squares = torch.zeros(2, dtype=torch.float64, device=losses.device)
        for parameter, exact in zip(model.parameters(), self.gradients, strict=True):
            found = _grad(parameter)
            if not way.alone:
                dist.all_reduce(found)
            squares += torch.stack([(found - exact).double().square().sum(), exact.double().square().sum()])
        apart, norm = squares.sqrt().tolist()
        return Off(float((whole - self.losses).double().norm() / self.losses.double().norm()), apart / norm)

    def _greatest(self, own: Callable[[], Off]) -> Off:
        everyone = self._ranks.attempt(own)
        return Off(max(off.losses for off in everyone), max(off.gradients for off in everyone))


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.float()  # a copy, of 16 bits


def _oracle(problem: StepProblem) -> Any:
    pattern = problem.workload.pattern
    return lambda q, k, v: _ExactAttention.apply(q, k, v, pattern)


class _ExactAttention(torch.autograd.Function):
    """The dense attention of `reference`, in fp64, as the type of q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.pattern = pattern
        return attention(q, k, v, pattern)[0].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        found = gradients(q, k, v, ctx.pattern, grads[0])
        return *(x.to(q.dtype) for x in found), None


# --- timed ------------------------------------------------------------------------------------------------------------


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
        """One of several, number by number."""
        return cls(*(taken([getattr(x, name) for x in times]) for name in ("ms", "wall_ms", "host_ms")))


@dataclass(frozen=True)
class Stepper:
    """One way's step, as it is timed. run: forward and backward. clear: comes after it, and is not timed."""

    run: Callable[[], object]
    inside: Callable[[], AbstractContextManager[Any]]
    clear: Callable[[], None]

    def turn(self, ranks: RankGroup, steps: int) -> StepTime:
        """All ranks call it. Raises Failed, on every rank, where it failed on one."""

        def own() -> StepTime:
            with self.inside():
                return StepTime.each(statistics.median, [self._one(ranks.device) for _ in range(steps)])

        return StepTime.each(max, ranks.attempt(own))

    def peak(self, ranks: RankGroup) -> int | None:
        """Peak bytes of torch's allocator during a step, all that is held included, on the fullest rank."""
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
        """The ranks begin together."""
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
    """For each way the times of its rounds; the ways are warm already."""
    found: dict[str, list[StepTime]] = {name: [] for name in steppers}
    for _ in range(turns.rounds):
        for name, stepper in steppers.items():
            found[name].append(stepper.turn(ranks, turns.steps))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
