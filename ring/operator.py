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


@torch.library.custom_op("ring::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, prepared: int) -> tuple[Tensor, Tensor]:
    """q (B, N, H, D), k and v (B, N, Hk, D) -> out like q, lse (B, H, N)."""
    return _prepared[prepared].run(q, k, v)
