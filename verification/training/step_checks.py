"""Checks of a training run, one small function each.

A check takes a TrainingCase, its StepExpectation and one StepObservation per rank, in rank order. It returns the worst
ratio (deviation / allowed) by quantity, or an empty dict if the check is exact. It raises WrongResult.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from verification.failures import WrongResult, name_ranks
from verification.training.dense.dense_step import FIRST
from verification.training.step_expectation import StepExpectation
from verification.training.step_observation import Array, PartObservation, StepObservation, StepObservations
from verification.training.training_case import TrainingCase

Ratios = dict[str, float]


def check_batches(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that each rank has its shard of its data rank's tokens, labels and positions within documents."""
    positions, within = case.shards().positions, case.positions().numpy()
    for rank, observation in enumerate(observations):
        shard = positions[observation.index]
        for number in range(case.accumulation):
            for name in ("tokens", "labels"):
                expected = getattr(expectation.first, name)[observation.data_rank, number].numpy()[:, shard]
                label = f"batches: {name} of micro-batch {number + 1} on {_label(case, rank)}"
                _check_equal(label, getattr(observation, name)[number], expected)
            _check_equal(f"batches: positions on {_label(case, rank)}", observation.positions[number], within[shard])
    return {}


def _check_equal(label: str, actual: Array, expected: Array) -> None:
    if actual.shape != expected.shape or not np.array_equal(actual, expected):
        raise WrongResult(f"{label} are {actual.tolist()}; its shard is {expected.tolist()}")


def check_sharded(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that the model's modules process exactly the number of tokens in the rank's shard."""
    for number, part in enumerate(case.parts):
        counts = part.shards().counts
        for rank, observation in enumerate(observations):
            token_counts, expected = observation.parts[number].token_counts, counts[observation.parts[number].index]
            if token_counts != {expected}:
                raise WrongResult(
                    f"sharded: on {_label(part, rank)} the model's modules had {sorted(token_counts)} tokens of a "
                    f"sequence of {case.tokens}; the layout gives the rank {expected}"
                )
    return {}


def check_quantity(
    quantity: str, case: TrainingCase, expectation: StepExpectation, observations: StepObservations,
    *, later: bool | None = None,
) -> Ratios:  # fmt: skip
    """Check |actual - exact| <= allowed for all entries of a quantity on every rank. later: True selects the steps
    after the first, False the first step, None all."""
    worst = 0.0
    for rank, observation in enumerate(observations):
        for name, actual, exact, allowed in _pairs(quantity, expectation, observation):
            if later is not None and later == (name == FIRST):
                continue
            where = f"{quantity}: {name} on {_label(case, rank)}"
            if actual is None or exact is None:
                raise WrongResult(f"{where} is {'missing' if actual is None else 'not expected'}", quantity, np.inf)
            if actual.shape != exact.shape:
                raise WrongResult(f"{where} has shape {actual.shape}, not {exact.shape}", quantity, np.inf)
            ratio = _ratio(actual, exact, allowed)
            if not (ratio <= 1.0).all():
                raise WrongResult(f"{where} {_worst(actual, exact, allowed)}", quantity, float(np.max(ratio)))
            worst = max(worst, float(ratio.max(initial=0.0)))
    return {quantity: worst}


def deviations(expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Return the worst ratio of each quantity without raising; infinite for a missing, extra or non-finite entry."""
    ratios = {}
    for quantity in expectation.exact:
        pairs = [pair for observation in observations for pair in _pairs(quantity, expectation, observation)]
        worst = [
            np.inf if a is None or b is None or a.shape != b.shape else np.max(_ratio(a, b, allowed), initial=0.0)
            for _, a, b, allowed in pairs
        ]
        ratios[quantity] = float(np.nan_to_num(np.max(worst, initial=0.0), nan=np.inf))
    return ratios


def _pairs(
    quantity: str, expectation: StepExpectation, observation: StepObservation
) -> Iterator[tuple[str, Array | None, Array | None, float]]:
    """Yield (name, actual, exact, allowed) for each entry of a quantity that the rank has or must have."""
    named, expected = getattr(observation, quantity), expectation.exact[quantity]
    for name in dict.fromkeys((*expected, *named)):
        exact = expected.get(name)
        if exact is not None and quantity == "logits":
            exact = exact[observation.data_rank]
        yield name, named.get(name), exact, expectation.allowed[quantity].get(name, 0.0)


def _ratio(actual: Array, exact: Array, allowed: float) -> Array:
    """Deviation of each entry as a fraction of the allowed one."""
    error = np.abs(actual.astype(np.float64) - exact)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(error == 0.0, 0.0, error / allowed)


def _worst(actual: Array, exact: Array, allowed: float) -> str:
    ratio = _ratio(actual, exact, allowed)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio))), ratio.shape)
    where = f" at {tuple(map(int, at))}" if at else ""
    return (
        f"is {actual[at]}{where}, expected {exact[at]}: deviation {abs(actual[at] - exact[at]):.3g} is {ratio[at]:.3g} "
        f"times the allowed {allowed:.3g}; {int((~(ratio <= 1.0)).sum())} of {ratio.size} entries deviate by more"
    )


def check_alike(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that losses, gradients, norms and parameters have the same bits on all ranks, and logits on the ranks of a
    context group."""
    for quantity in ("losses", "gradients", "norms", "parameters", "logits"):
        for rank, observation in enumerate(observations):
            # Compare logits with the first rank of the same context group.
            group = (other for other, x in enumerate(observations) if x.data_rank == observation.data_rank)
            like = next(group) if quantity == "logits" else 0
            for name, x in getattr(observation, quantity).items():
                other = getattr(observations[like], quantity)[name]
                if x.dtype != other.dtype or x.tobytes() != other.tobytes():
                    raise WrongResult(
                        f"alike: {quantity}: {name} is not the same on {name_ranks((like, rank))}: "
                        f"{_first_difference(other, x)}"
                    )
    return {}


def _first_difference(a: Array, b: Array) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} of shape {a.shape}, and {b.dtype} of shape {b.shape}"
    differ = np.flatnonzero(np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8))
    at = int(differ[0]) // a.dtype.itemsize
    return f"{float(a.flat[at])!r} and {float(b.flat[at])!r} at entry {at}; {len(differ)} bytes differ"


def check_spoilt(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that non-finite gradients are clipped as torch clips them."""
    for rank, observation in enumerate(observations):
        if observation.wrongly_clipped:
            raise WrongResult(
                f"spoilt: on {_label(case, rank)}, with the gradients of a parameter all {case.spoilt}, the clip "
                f"differs from torch's in {', '.join(observation.wrongly_clipped)}"
            )
    return {}


def check_bytes(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check the bytes of recorded messages, from every rank to every other, against `reference.cost`."""
    for number, part in enumerate(case.parts):
        for rank, observation in enumerate(observations):
            _check_bytes_of(part, expectation.sent[number], rank, observation.parts[number])
    return {}


def _check_bytes_of(part: TrainingCase, sent: Array, rank: int, observation: PartObservation) -> None:
    index = observation.index
    directions = (("sent", observation.sent, sent[index]), ("received", observation.received, sent[:, index]))
    for peer, (verb, recorded, expected_by_peer) in product(range(part.context), directions):
        expected = expected_by_peer[peer]
        actual = expected if recorded is None else recorded.get(peer, 0)
        if actual != expected:
            raise WrongResult(
                f"bytes: {_label(part, rank)} {verb} {actual} bytes to or from index {peer} of its group in "
                f"{part.steps} steps; with this pattern, layout, exchange and checkpointing it must be {expected}"
            )


def check_graphs(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check the number of runs of compiled graphs: a fallback to eager lowers it."""
    for number, part in enumerate(case.parts):
        expected = expectation.graph_runs[number]
        for rank, observation in enumerate(observations):
            actual = observation.parts[number].graph_runs
            if actual != expected:
                raise WrongResult(
                    f"graphs: {_label(part, rank)} ran {actual} compiled graphs in {part.steps} steps; with compiled "
                    f"{part.compiled!r}, wrapper and checkpointing it must run {expected}"
                )
    return {}


def _label(case: TrainingCase, rank: int) -> str:
    data, index = case.coordinates(rank)
    return f"rank {rank} (data {data}, context {index})"


# Checks in the order in which they are made: causes before effects.
STEP_CHECKS: dict[str, Callable[[TrainingCase, StepExpectation, StepObservations], Ratios]] = {
    "batches": check_batches,
    "sharded": check_sharded,
    "logits": partial(check_quantity, "logits"),
    "first loss": partial(check_quantity, "losses", later=False),
    "gradients": partial(check_quantity, "gradients"),
    "first norm": partial(check_quantity, "norms", later=False),
    "later losses": partial(check_quantity, "losses", later=True),
    "later norms": partial(check_quantity, "norms", later=True),
    "parameters": partial(check_quantity, "parameters"),
    "alike": check_alike,
    "spoilt": check_spoilt,
    "bytes": check_bytes,
    "graphs": check_graphs,
}
