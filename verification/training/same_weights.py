"""The law of `ring.nn.SameWeights`: the same drawn steps have the same bits on any ranks, data x context.

Compared are the losses, the gradients of step one, their norms, the parameters after the last step and what the
optimizer keeps, as integers: 0.0 is not -0.0. NaN equals NaN. The loss of a step is a sum over micro-batches, so losses
are compared between runs with equally many of them alone. The other run takes all steps at once, also where the first
one is resumed from a checkpoint.

Steps of these kinds are drawn: accumulation, documents of each step, all recomputation, ignored labels, clipping, both
optimizers, tied weights, both norms, biases, GQA, fp64, fp32, and bf16 by autocast. Left out are what `SameWeights`
refuses: FSDP's parameters, compiled models, modules with parameters beside modules, as sinks, ranks without a chunk; a
loss with `averaged_over`; and transports other than process groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from verification.check.properties import Property
from verification.failures import WrongResult
from verification.models.results import Array, Named
from verification.run.backends import Backend
from verification.training.step_observation import StepObservation
from verification.training.training_case import TrainingCase

SAME_WEIGHTS = Property(
    "same weights on any ranks", ("same weights",), concerns=lambda case: case.other_ranks is not None
)


def check_same_weights(
    backend: Backend, case: TrainingCase, observations: Sequence[StepObservation]
) -> dict[str, float]:
    """Check that a step's results have the same bits on the other ranks of the Case. observations: of its own ranks."""
    if not SAME_WEIGHTS.concerns(case):
        return {}
    others = _observe_elsewhere(backend, case)
    for quantity in ("losses", "gradients", "norms", "parameters", "moments"):
        if quantity == "losses" and {part.accumulation for part in (*case.parts, case.elsewhere)} != {
            case.accumulation
        }:
            continue
        for rank, other in enumerate(others):
            found = list(_differences(getattr(observations[0], quantity), getattr(other, quantity)))
            if found:
                failure = WrongResult(
                    f"same weights: {quantity}: {'; '.join(found[:3])}: on rank 0 of the Case and on rank {rank} of "
                    f"{case.other_ranks}; they must be the same bits",
                    quantity,
                )
                failure.check, failure.broken = SAME_WEIGHTS.checks[0], SAME_WEIGHTS.title
                raise failure
    return {SAME_WEIGHTS.title: 0.0}


def _observe_elsewhere(backend: Backend, case: TrainingCase) -> Sequence[StepObservation]:
    """Return the Observations of the other ranks, which take the place of the Case's for it."""
    from verification.training.rank.own_setup import OwnSetup  # lazy: importing FSDP slows every command
    from verification.training.rank.rank_step import train_on_rank

    other = case.elsewhere
    try:
        if other.world != case.world:
            backend.start(other.world)
        backend.submit(train_on_rank, other, OwnSetup, case)
        return backend.collect()
    finally:
        if other.world != case.world:
            backend.start(case.world)


def _differences(ours: Named, theirs: Named) -> Iterator[str]:
    """Yield, for each name, where two results differ in a bit, in words."""
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            yield f"{name} is {_described(a)} and {_described(b)}"
            continue
        differ = (_integers(a) != _integers(b)) & ~(np.isnan(a) & np.isnan(b))
        if differ.any():
            at = tuple(map(int, np.argwhere(differ)[0]))
            where = f" at {at}" if at else ""
            yield f"{name}{where} is {a[at]!r} and {b[at]!r} ({differ.sum()} of {differ.size} differ)"


def _integers(x: Array) -> Array:
    return np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").reshape(x.shape)


def _described(x: Array | None) -> str:
    return "missing" if x is None else f"{x.dtype} of shape {x.shape}"
