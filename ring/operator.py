"""The forward of a call as one operator, `torch.ops.ring.attention`.

Whoever watches operators sees one instead of some hundred: selective checkpointing can name it in its policy and save
what it returns, and then computes no ring forward twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Prepared:
    """A forward that is ready to run. An operator takes tensors and numbers, so this one goes by its number, and is to
    be kept alive until the operator has run.
    """

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.run = run
        self.number = next(_numbers)
        _prepared[self.number] = self


_numbers = itertools.count()
_prepared: WeakValueDictionary[int, Prepared] = WeakValueDictionary()


def run_prepared(q: Tensor, k: Tensor, v: Tensor, prepared: int) -> tuple[Tensor, Tensor]:
    """What the operator does, operation by operation, for those who watch these: q (B, N, H, D), k and v
    (B, N, Hk, D) -> out like q, lse (B, H, N). prepared: the number of a forward.

    Raises ValueError for any other number: the operator is no way to call `ring_attention`.
    """
    if prepared not in _prepared:
        raise ValueError(f"prepared must be the number of a forward that ring_attention has begun, got {prepared}")
    return _prepared[prepared].run(q, k, v)


attention = torch.library.custom_op("ring::attention", run_prepared, mutates_args=())
