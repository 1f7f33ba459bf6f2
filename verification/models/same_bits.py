"""The law of the same bits: a step's results on other ranks, data x context, are the same integers.

Compared are losses, the gradients of step one, norms, parameters and what the optimizer keeps after each of its steps,
in the order of time: 0.0 is not -0.0, NaN equals NaN. The loss of a step is a sum over micro-batches, so losses are
compared between runs with equally many of them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verification.check.properties import Property
from verification.failures import WrongResult
from verification.models.batches import global_batch
from verification.models.observation import ModelObservation
from verification.models.results import FIRST, Array, Named, Results
from verification.models.step_case import StepCase
from verification.wording import counted

SAME_WEIGHTS = Property(
    "same weights on any ranks", ("same weights",), concerns=lambda case: case.other_ranks is not None
)


def check_same_bits(
    case: StepCase, observations: Sequence[Results], elsewhere: Sequence[Results], losses: bool
) -> dict[str, float]:
    """Check that a step's results have the same bits on all ranks of the Case and on its other ranks, `elsewhere`.
    losses: whether those are compared."""
    for run, results in ((case, observations[1:]), (case.elsewhere, elsewhere)):
        for rank, other in enumerate(results, len(observations) - len(results) if run is case else 0):
            found = _first_differences(_in_time(observations[0], losses), _in_time(other, losses))
            if found:
                failure = WrongResult(
                    f"same weights: {'; '.join(found.values())}: on rank 0 of {_mesh(case)} and on rank {rank} of "
                    f"{_mesh(run)}; they must be the same bits",
                    next(iter(found)),
                )
                failure.check, failure.broken = SAME_WEIGHTS.checks[0], SAME_WEIGHTS.title
                raise failure
    return {SAME_WEIGHTS.title: 0.0}


def describe_cause(
    case: StepCase, observations: Sequence[ModelObservation], elsewhere: Sequence[ModelObservation], quantity: str
) -> str:
    """Return a sentence on the part of step one where bits differ first. quantity: the first one that differs."""
    here, there = (_whole_logits(*run) for run in ((case, observations), (case.elsewhere, elsewhere)))
    padding = global_batch(case, 0).padding.permute(1, 0, 2, 3).flatten(0, 2).numpy()
    if not _equal(np.where(padding[..., None], 0, here), np.where(padding[..., None], 0, there)):
        return (
            "cause: the logits of step one differ already: in the forward the bits of a token depend on the rows that "
            "a rank computes at once, as in a matrix product, or attention is called without same_bits"
        )
    order = "in an order that depends on the ranks"
    where = {
        "losses": f"the loss has not: it is summed {order}",
        "gradients": f"gradients at the optimizer have not: in the backward or between ranks they are summed {order}",
        "norms": f"the norm of the gradients has not: it is summed {order}",
    }.get(quantity, "gradients and norm too: the cause is in the update, or in a later step")
    return f"cause: the logits of step one have the same bits, {where}"


def _whole_logits(case: StepCase, observations: Sequence[ModelObservation]) -> Array:
    """Return the logits of all sequences of step one, in their order."""
    some = next(iter(observations[0].logits.values()))
    whole = np.zeros((case.sequences, case.tokens, some.shape[-1]), some.dtype)
    for seen in observations:
        for number, (logits, held) in enumerate(zip(seen.logits.values(), seen.held, strict=True)):
            first = (number * case.data + seen.data_rank) * case.batch
            whole[first : first + case.batch, held] = logits
    return whole


def _in_time(seen: Results, losses: bool) -> dict[tuple[str, str], Array]:
    """Return the results by quantity and name, in the order of time."""
    found: dict[tuple[str, str], Array] = {}

    def add(quantity: str, named: Named, end: str = "") -> None:
        found.update({(quantity, name): x for name, x in named.items() if name.endswith(end)})

    for step in seen.losses:
        add("losses", seen.losses if losses else {}, step)
        add("gradients", seen.gradients if step == FIRST else {})
        add("norms", seen.norms, step)
        add("parameters", seen.after, f" after {step}")
    add("parameters", seen.after)  # of a step with several updates
    add("parameters", {f"{name} after the last step": x for name, x in seen.parameters.items()})
    return found


def _first_differences(ours: dict[tuple[str, str], Array], theirs: dict[tuple[str, str], Array]) -> dict[str, str]:
    """Return where two results differ in a bit first, in words, by quantity."""
    found: dict[str, str] = {}
    for quantity, name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get((quantity, name)), theirs.get((quantity, name))
        if quantity not in found and not _equal(a, b):
            found[quantity] = f"{quantity}: {name}{_difference(a, b)}"
    return found


def _equal(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return not _differ(a, b).any()


def _differ(a: Array, b: Array) -> Array:
    integers = (np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").reshape(x.shape) for x in (a, b))
    return np.not_equal(*integers) & ~(np.isnan(a) & np.isnan(b))


def _difference(a: Array | None, b: Array | None) -> str:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return f" is {_described(a)} and {_described(b)}"
    differ = _differ(a, b)
    at = tuple(map(int, np.argwhere(differ)[0]))
    where = f" at {at}" if at else ""
    return f"{where} is {a[at]} and {b[at]} ({differ.sum()} of {differ.size} differ)"


def _described(x: Array | None) -> str:
    return "missing" if x is None else f"{x.dtype} of shape {x.shape}"


def _mesh(case: StepCase) -> str:
    return f"{counted(case.world, 'rank')}, data {case.data} x context {case.context}"
