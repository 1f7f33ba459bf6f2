"""Exposes the forward of a call as one dispatcher operator, `torch.ops.ring.attention`.

Selective checkpointing can name the operator in its policy and save its results, instead of those of some hundred
operators; then no ring forward is recomputed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

Results = tuple[Tensor, Tensor, list[Tensor]]
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None], Results]

_numbers = itertools.count()
_prepared: dict[int, Forward] = {}


def as_one_operator(run: Forward, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Results:
    """Return run(q, k, v, sinks). Operators take only tensors and numbers, so `run` is passed by a number."""
    number = next(_numbers)
    _prepared[number] = run
    try:
        out, lse, kept = torch.ops.ring.attention.default(q, k, v, sinks, number)
    finally:
        del _prepared[number]
    return out, lse, kept


def run_prepared(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, prepared: int) -> Results:
    """Run the operator's forward, visible to dispatch modes: q (B, N, H, D), k (B, N, Hk, D), v (B, N, Hk, Dv) and
    sinks (H,) -> out (B, N, H, Dv), lse (B, H, N), and the keys that are kept. prepared: the number of a forward.

    Raises ValueError for any other number: call `ring_attention`, not the operator.
    """
    if prepared not in _prepared:
        raise ValueError(f"prepared must be the number of a forward that ring_attention has begun, got {prepared}")
    return _prepared[prepared](q, k, v, sinks)


def _run_latest(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, prepared: int) -> Results:
    """Delegate to the latest import of this module, since a process registers an operator only once."""
    results: Results = sys.modules[__name__].run_prepared(q, k, v, sinks, prepared)
    return results


# Do not use `torch.library.custom_op`: its wrappers add dozens of Python calls. `ring.attention` differentiates, and
# compiled graphs have operators of their own (`ring.torch_compile`).
if not hasattr(torch.ops.ring, "attention"):
    _library = torch.library.Library("ring", "FRAGMENT")
    _library.define(
        "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int prepared) -> (Tensor, Tensor, Tensor[])"
    )
    _library.impl("attention", _run_latest, "CompositeExplicitAutograd")
    vars(_run_latest)["library"] = _library  # keep it: its deletion would delete the operator
