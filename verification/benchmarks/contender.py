"""A method to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Contender:
    """forward: a forward pass; training: a forward and backward pass. Both take no arguments and return their results,
    so that a caller can tell these from working memory.

    local: no rank waits for another. capturable: a CUDA graph can capture it. note: what a reader must know to compare
    it with others.
    """

    forward: Callable[[], tuple[Tensor, ...]]
    training: Callable[[], tuple[Tensor, ...]]
    local: bool = False
    capturable: bool = False
    note: str = ""

    @classmethod
    def of(
        cls, attend: Attend, inputs: Inputs, local: bool = False, capturable: bool = False, note: str = ""
    ) -> Contender:
        """attend: a differentiable function of q, k, v. inputs: (q, k, v, dout), where q, k, v require gradients."""
        q, k, v, dout = inputs

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attend(q, k, v),)

        def training() -> tuple[Tensor, ...]:
            out = attend(q, k, v)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

        return cls(forward, training, local, capturable, note)

    def passes(self) -> tuple[tuple[str, Callable[[], tuple[Tensor, ...]]], ...]:
        return (PASSES[0], self.forward), (PASSES[1], self.training)
