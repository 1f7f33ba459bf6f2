"""The forward of a call as one operator, `torch.ops.ring.attention`.

Whoever watches operators sees one instead of some hundred: selective checkpointing can name it in its policy and save
what it returns, and then computes no ring forward twice.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_numbers = itertools.count()
_prepared: dict[int, Forward] = {}


def as_one_operator(run: Forward, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """run(q, k, v). An operator takes tensors and numbers, so the forward goes by a number until it has run."""
    number = next(_numbers)
    _prepared[number] = run
    try:
        out, lse = torch.ops.ring.attention.default(q, k, v, number)
    finally:
        del _prepared[number]
    return out, lse


def run_prepared(q: Tensor, k: Tensor, v: Tensor, prepared: int) -> tuple[Tensor, Tensor]:
    """What the operator does, operation by operation, for those who watch these: q (B, N, H, D), k and v
    (B, N, Hk, D) -> out like q, lse (B, H, N). prepared: the number of a forward.

    Raises ValueError for any other number: the operator is no way to call `ring_attention`.
    """
    if prepared not in _prepared:
        raise ValueError(f"prepared must be the number of a forward that ring_attention has begun, got {prepared}")
    return _prepared[prepared](q, k, v)


def _run_latest(q: Tensor, k: Tensor, v: Tensor, prepared: int) -> tuple[Tensor, Tensor]:
    """By this module as it was last imported: an operator is there once in a process."""
    found: tuple[Tensor, Tensor] = sys.modules[__name__].run_prepared(q, k, v, prepared)
    return found


# Not by `torch.library.custom_op`, whose wrappers make some dozens of Python calls more of each: `ring.attention`
# differentiates, and compiled graphs have operators of their own (`ring.compile_ops`).
if not hasattr(torch.ops.ring, "attention"):
    _library = torch.library.Library("ring", "FRAGMENT")
    _library.define("attention(Tensor q, Tensor k, Tensor v, int prepared) -> (Tensor, Tensor)")
    _library.impl("attention", _run_latest, "CompositeExplicitAutograd")
    vars(_run_latest)["library"] = _library  # which would take the operator with it
