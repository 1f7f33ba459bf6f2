"""Whether a way computes the right thing: its losses and gradients beside those of one process that rounds less.

The exact step has the model's parameters in fp32 and the dense attention of `reference`, in fp64. How far 16 bits are
from that is what one GPU shows, by torch's attention eagerly: its rounding is at most `sqrt(roundings) u` in relation
to the norm, for as many independent roundings on the longest path, u being half a last place. Another order of the same
kind of roundings adds up to about as much; a way that is off by more than MOST times that is wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reference import Pattern, attention, gradients
from ring.nn import gather
from verification.benchmarks.rank_group import RankGroup
from verification.benchmarks.step_models import StepModel
from verification.benchmarks.step_ways import ALONE, StepProblem, Way, way_of

MOST = 2.0
ROUNDINGS = 32  # of a layer, forward and backward: its products, norms, turns, the gate and the sums


@dataclass(frozen=True)
class Off:
    """Norms of differences over norms: of all tokens' losses; of all parameters' gradients, summed over ranks."""

    losses: float
    gradients: float


def step(model: Any, way: Way) -> Tensor:
    """Forward and backward of the mean over all labelled tokens of all ranks: this rank's summand, and its gradients,
    which are not summed. Returns the tokens' losses, (1, N). model: a StepModel, or one that is compiled."""
    losses: Tensor = model(way.batch.tokens, way.batch.labels, way.context, way.attend)
    (losses.sum() / (way.context.layout.n - 1)).backward()
    return losses.detach()


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
        self._agreed(lambda: self._compute(model, problem, alone))
        self.rounding = self._agreed(lambda: self._rounding_of(model, alone))
        model.zero_grad()
        most = math.sqrt(ROUNDINGS * problem.shape.layers) * torch.finfo(problem.workload.dtype).eps / 2
        if not max(self.rounding.losses, self.rounding.gradients) <= most:
            raise Wrong(f"one GPU is off by {self.rounding}, of which rounding explains {most:.1e}")

    def off(self, losses: Tensor, model: StepModel, way: Way) -> Off:
        """Of a step that all ranks have just made, on the rank where it is greatest. All ranks call it."""
        return self._agreed(lambda: self._off(losses, model, way))

    def refuse(self, way: Way, off: Off) -> None:
        """Raises Wrong where that is not explained by rounding."""
        compared = [("losses", off.losses, self.rounding.losses)]
        if way.exact:
            compared.append(("gradients", off.gradients, self.rounding.gradients))
        for what, found, rounding in compared:
            if not found <= MOST * rounding:  # NaN neither
                raise Wrong(f"{what} are off by {found:.1e} of their norm, one GPU's by rounding {rounding:.1e}")

    def _compute(self, model: StepModel, problem: StepProblem, alone: Way) -> Off:
        wide = copy.deepcopy(model).float()
        self.losses = step(wide, dataclasses.replace(alone, attend=_oracle(problem.workload.pattern)))
        self.gradients = [_gradient(parameter) for parameter in wide.parameters()]
        return Off(0.0, 0.0)

    def _rounding_of(self, model: StepModel, alone: Way) -> Off:
        with alone.inside():
            return self._off(step(model, alone), model, alone)

    def _off(self, losses: Tensor, model: StepModel, way: Way) -> Off:
        whole = gather(way.context, losses)
        squares = torch.zeros(2, dtype=torch.float64, device=losses.device)
        for parameter, exact in zip(model.parameters(), self.gradients, strict=True):
            found = _gradient(parameter)
            if not way.alone:
                dist.all_reduce(found)
            squares += torch.stack([(found - exact).double().square().sum(), exact.double().square().sum()])
        apart, norm = squares.sqrt().tolist()
        return Off(float((whole - self.losses).double().norm() / self.losses.double().norm()), apart / norm)

    def _agreed(self, own: Callable[[], Off]) -> Off:
        everyone = self._ranks.attempt(own)
        return Off(max(off.losses for off in everyone), max(off.gradients for off in everyone))


class Wrong(Exception):
    """A way computes something else; the message says by how much. The same on every rank."""


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.float()  # a copy, of 16 bits


def _oracle(pattern: Pattern) -> Any:
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
