"""What is checked of every training run: one small function for each check.

A check takes a TrainingCase, its StepExpectation and one StepObservation per rank, in the ranks' order. It returns the
worst deviation as a fraction of what is allowed, by quantity, or an empty dict where it is exact. It raises
WrongResult.
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
    """Every rank was given its shard of its data rank's tokens, labels and positions within documents."""
    positions, within = case.shards().positions, case.positions().numpy()
    for rank, seen in enumerate(observations):
        mine = positions[seen.index]
        for number in range(case.accumulation):
            for name in ("tokens", "labels"):
                wanted = getattr(expectation.first, name)[seen.data_rank, number].numpy()[:, mine]
                what = f"batches: {name} of micro-batch {number + 1} on {_place(case, rank)}"
                _check_equal(what, getattr(seen, name)[number], wanted)
            _check_equal(f"batches: positions on {_place(case, rank)}", seen.positions[number], within[mine])
    return {}


def _check_equal(what: str, found: Array, wanted: Array) -> None:
    if found.shape != wanted.shape or not np.array_equal(found, wanted):
        raise WrongResult(f"{what} are {found.tolist()}; its shard is {wanted.tolist()}")


def check_sharded(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """The model's modules were given the tokens that the layout gives the rank, never more or fewer."""
    for number, part in enumerate(case.parts):
        counts = part.shards().counts
        for rank, observation in enumerate(observations):
            seen = observation.parts[number]
            if seen.token_counts != {counts[seen.index]}:
                raise WrongResult(
                    f"sharded: on {_place(part, rank)} the model's modules had {sorted(seen.token_counts)} tokens of a "
                    f"sequence of {case.tokens}; the layout gives the rank {counts[seen.index]}"
                )
    return {}


def check_quantity(
    quantity: str, case: TrainingCase, expectation: StepExpectation, observations: StepObservations,
    *, later: bool | None = None,
) -> Ratios:  # fmt: skip
    """|seen - exact| <= allowed, for all numbers of a quantity, on every rank. later: of step one alone (False), or
    of the steps after it (True)."""
    worst = 0.0
    for rank, seen in enumerate(observations):
        for name, found, wanted, allowed in _pairs(quantity, expectation, seen):
            if later is not None and later == (name == FIRST):
                continue
            where = f"{quantity}: {name} on {_place(case, rank)}"
            if found is None or wanted is None:
                raise WrongResult(f"{where} is {'missing' if found is None else 'not expected'}", quantity, np.inf)
            if found.shape != wanted.shape:
                raise WrongResult(f"{where} has shape {found.shape}, not {wanted.shape}", quantity, np.inf)
            ratio = _ratio(found, wanted, allowed)
            if not (ratio <= 1.0).all():
                raise WrongResult(f"{where} {_worst(found, wanted, allowed)}", quantity, float(np.max(ratio)))
            worst = max(worst, float(ratio.max(initial=0.0)))
    return {quantity: worst}


def deviations(expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """The worst deviation of each quantity as a fraction of what is allowed, whatever was seen; infinite where a number
    is missing, too many or not finite."""
    found = {}
    for quantity in expectation.exact:
        pairs = [pair for seen in observations for pair in _pairs(quantity, expectation, seen)]
        worst = [
            np.inf if a is None or b is None or a.shape != b.shape else np.max(_ratio(a, b, allowed), initial=0.0)
            for _, a, b, allowed in pairs
        ]
        found[quantity] = float(np.nan_to_num(np.max(worst, initial=0.0), nan=np.inf))
    return found


def _pairs(
    quantity: str, expectation: StepExpectation, seen: StepObservation
) -> Iterator[tuple[str, Array | None, Array | None, float]]:
    """(name, seen, exact, allowed) of all numbers of a quantity that a rank has, or must have."""
    named, exact = getattr(seen, quantity), expectation.exact[quantity]
    for name in dict.fromkeys((*exact, *named)):
        wanted = exact.get(name)
        if wanted is not None and quantity == "logits":
            wanted = wanted[seen.data_rank]
        yield name, named.get(name), wanted, expectation.allowed[quantity].get(name, 0.0)


def _ratio(found: Array, wanted: Array, allowed: float) -> Array:
    """Deviations as fractions of what is allowed."""
    error = np.abs(found.astype(np.float64) - wanted)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(error == 0.0, 0.0, error / allowed)


def _worst(found: Array, wanted: Array, allowed: float) -> str:
    ratio = _ratio(found, wanted, allowed)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio))), ratio.shape)
    where = f" at {tuple(map(int, at))}" if at else ""
    return (
        f"is {found[at]}{where}, expected {wanted[at]}: deviation {abs(found[at] - wanted[at]):.3g} is {ratio[at]:.3g} "
        f"times what is allowed, {allowed:.3g}; {int((~(ratio <= 1.0)).sum())} of {ratio.size} entries deviate by more"
    )


def check_alike(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Losses, gradients, norms and parameters are the same on all ranks, bit by bit; logits on those that share a
    sequence."""
    for quantity in ("losses", "gradients", "norms", "parameters", "logits"):
        for rank, seen in enumerate(observations):
            # The first rank that has the same sequences.
            alike = (other for other, x in enumerate(observations) if x.data_rank == seen.data_rank)
            like = next(alike) if quantity == "logits" else 0
            for name, x in getattr(seen, quantity).items():
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
    """Gradients that are not finite are clipped as torch clips them."""
    for rank, seen in enumerate(observations):
        if seen.not_as_clipped:
            raise WrongResult(
                f"spoilt: on {_place(case, rank)}, where the gradients of a parameter are {case.spoilt}, the clip does "
                f"not make what torch makes of {', '.join(seen.not_as_clipped)}"
            )
    return {}


def check_bytes(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """Where messages are recorded, their bytes are those of `reference.cost`, from every rank to every other."""
    for number, part in enumerate(case.parts):
        for rank, seen in enumerate(observations):
            _check_bytes_of(part, expectation.sent[number], rank, seen.parts[number])
    return {}


def _check_bytes_of(part: TrainingCase, sent: Array, rank: int, seen: PartObservation) -> None:
    ways = (("sent", seen.sent, sent[seen.index]), ("received", seen.received, sent[:, seen.index]))
    for peer, (done, bytes_of, all_due) in product(range(part.context), ways):
        due = all_due[peer]
        found = due if bytes_of is None else bytes_of.get(peer, 0)
        if found != due:
            raise WrongResult(
                f"bytes: {_place(part, rank)} {done} {found} bytes to or from index {peer} of its group "
                f"in {part.steps} steps; pattern, layout, exchange and checkpointing make it {due}"
            )


def check_graphs(case: TrainingCase, expectation: StepExpectation, observations: StepObservations) -> Ratios:
    """What is to be compiled ran as compiled graphs, as often as it must: nothing fell back to eager."""
    for number, part in enumerate(case.parts):
        due = expectation.graph_runs[number]
        for rank, observation in enumerate(observations):
            found = observation.parts[number].graph_runs
            if found != due:
                raise WrongResult(
                    f"graphs: {_place(part, rank)} ran {found} compiled graphs in {part.steps} steps; with compiled "
                    f"{part.compiled!r}, wrapper and checkpointing it must run {due}"
                )
    return {}


def _place(case: TrainingCase, rank: int) -> str:
    data, index = case.coordinates(rank)
    return f"rank {rank} (data {data}, context {index})"


# In the order in which they are made: causes before effects.
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
