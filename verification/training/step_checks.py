"""Checks of a training run, one small function each, and the properties that a report lists.

They are exact, except those of `verification.models.quantities`: each returns an empty dict, or raises WrongResult.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from verification.check.properties import EVERY_RANK_ANSWERS, Property
from verification.failures import WrongResult, name_ranks
from verification.models.quantities import (
    QUANTITY_CHECKS,
    Check,
    Ratios,
    check_results,
    label_rank,
    quantity_properties,
)
from verification.models.results import Array
from verification.training.step_expectation import StepExpectation
from verification.training.step_observation import PartObservation, StepObservations
from verification.training.training_case import TrainingCase


def check_batches(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that each rank has its shard of its data rank's tokens, labels and positions within documents."""
    positions, within = case.shards().positions, case.positions().numpy()
    for rank, observation in enumerate(observations):
        shard = positions[observation.index]
        for number in range(case.accumulation):
            for name in ("tokens", "labels"):
                expected = getattr(expectation.first, name)[observation.data_rank, number].numpy()[:, shard]
                label = f"batches: {name} of micro-batch {number + 1} on {label_rank(case, rank)}"
                _check_equal(label, getattr(observation, name)[number], expected)
            _check_equal(
                f"batches: positions on {label_rank(case, rank)}", observation.positions[number], within[shard]
            )
    return {}


def _check_equal(label: str, actual: Array, expected: Array) -> None:
    if actual.shape != expected.shape or not np.array_equal(actual, expected):
        raise WrongResult(f"{label} are {actual.tolist()}; its shard is {expected.tolist()}")


def check_sharded(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that the model's modules process exactly the number of tokens in the rank's shard."""
    for number, part in enumerate(case.parts):
        layouts = {part} if part.same_bits is None else map(part.at, range(part.steps))
        counts = [layout.shards().counts for layout in layouts]
        for rank, observation in enumerate(observations):
            token_counts = observation.parts[number].token_counts
            expected = {by_rank[observation.parts[number].index] for by_rank in counts}
            if part.compares:  # chunks are computed alone, too
                token_counts = token_counts - set(range(max(expected))) | expected & token_counts
            if token_counts != expected:
                raise WrongResult(
                    f"sharded: on {label_rank(part, rank)} the model's modules had {sorted(token_counts)} tokens of a "
                    f"sequence of {case.tokens}; the layout gives the rank {sorted(expected)}"
                )
    return {}


def check_alike(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check that losses, gradients, norms, parameters and states have the same bits on all ranks, and logits on the
    ranks of a context group."""
    for quantity in ("losses", "gradients", "norms", "parameters", "after", "logits"):
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
                f"spoilt: on {label_rank(case, rank)}, with the gradients of a parameter all {case.spoilt}, the clip "
                f"differs from torch's in {', '.join(observation.wrongly_clipped)}"
            )
    return {}


def check_bytes(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Check the bytes of recorded messages, from every rank to every other, against `reference.cost`."""
    for number, part in enumerate(case.parts):
        for rank, observation in enumerate(observations):
            _check_part_bytes(part, expectation.sent[number], rank, observation.parts[number])
    return {}


def _check_part_bytes(part: TrainingCase, sent: Array, rank: int, observation: PartObservation) -> None:
    index = observation.index
    directions = (("sent", observation.sent, sent[index]), ("received", observation.received, sent[:, index]))
    for peer, (verb, recorded, expected_by_peer) in product(range(part.context), directions):
        expected = expected_by_peer[peer]
        actual = expected if recorded is None else recorded.get(peer, 0)
        if actual != expected:
            raise WrongResult(
                f"bytes: {label_rank(part, rank)} {verb} {actual} bytes to or from index {peer} of its group in "
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
                    f"graphs: {label_rank(part, rank)} ran {actual} compiled graphs in {part.steps} steps; with "
                    f"compiled {part.compiled!r}, wrapper and checkpointing it must run {expected}"
                )
    return {}


# Checks in the order in which they are made: causes before effects.
STEP_CHECKS: dict[str, Check] = {
    "batches": check_batches,
    "sharded": check_sharded,
    **QUANTITY_CHECKS,
    "alike": check_alike,
    "spoilt": check_spoilt,
    "bytes": check_bytes,
    "graphs": check_graphs,
}
STEP_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("tokens, labels, positions", ("batches",)),
    Property("no rank has a whole sequence", ("sharded",)),
    *quantity_properties("gradients after step one"),
    Property("ranks alike, bit by bit", ("alike",)),
    Property("clipped though not finite", ("spoilt",), concerns=lambda case: case.spoilt is not None),
    Property("bytes of the steps", ("bytes",), concerns=lambda case: case.handle == "recorded"),
    Property("runs of compiled graphs", ("graphs",), concerns=lambda case: case.compiled != "no"),
)


def check_step(
    case: TrainingCase,
    expectation: StepExpectation,
    observations: StepObservations,
    checks: Sequence[str] = tuple(STEP_CHECKS),
) -> dict[str, float]:
    """Return the worst ratio of each property by title, as `check_results`. checks: names of the checks to make."""
    selected = {name: STEP_CHECKS[name] for name in checks}
    return check_results(STEP_PROPERTIES, selected, case, expectation, observations)
