"""Each check finds what it is for, and the failure names the property that is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.training_cases import small_step
from verification.check.properties import broken_by
from verification.failures import WrongResult
from verification.training.material import global_batch
from verification.training.step_expectation import StepExpectation, expect_training
from verification.training.step_observation import PartObservation, StepObservation
from verification.training.step_properties import STEP_PROPERTIES, check_step
from verification.training.training_case import TrainingCase

CASE = small_step(4, data=2, accumulation=2, clipping=0.1, steps=3, cuts=(0, 3, 8), resumed="striped", spoilt="nan")
EXPECTATION = expect_training(CASE)


def honest(case: TrainingCase, expectation: StepExpectation) -> list[StepObservation]:
    """What ranks would see that make no error at all."""
    found = []
    batch = global_batch(case, 0)
    for rank in case.ranks:
        data, index = case.coordinates(rank)
        mine = case.shards().positions[index]
        seen = StepObservation(data, index)
        for number in range(case.accumulation):
            seen.tokens.append(batch.tokens[data, number].numpy()[:, mine])
            seen.labels.append(batch.labels[data, number].numpy()[:, mine])
            seen.positions.append(mine)
        for part, sent, runs in zip(case.parts, expectation.sent, expectation.graph_runs, strict=True):
            index = part.coordinates(rank)[1]
            moved = dict(enumerate(sent[index].tolist())), dict(enumerate(sent[:, index].tolist()))
            if case.handle != "recorded":
                moved = None, None  # type: ignore[assignment]
            seen.parts.append(PartObservation(index, {part.shards().counts[index]}, *moved, runs))
        for quantity, named in copy.deepcopy(expectation.exact).items():
            whole = {name: x[data] for name, x in named.items()} if quantity == "logits" else named
            getattr(seen, quantity).update(whole)
        found.append(seen)
    return found


COMPILED = small_step(2, accumulation=2, steps=2, resumed="zigzag", handle="mesh", compiled="aot_eager")


@pytest.mark.parametrize("case", [CASE, COMPILED, small_step(2)], ids=("resumed", "compiled", "plain"))
def test_what_is_right_holds(case: TrainingCase) -> None:
    expectation = expect_training(case)
    ratios = check_step(case, expectation, honest(case, expectation))
    assert set(ratios) == {one.title for one in STEP_PROPERTIES if one.concerns(case)}
    assert not any(ratios.values())


Spoil = Callable[[StepObservation], object]


def _off(quantity: str, by: float, name: str | None = None) -> Spoil:
    """Add to one number of a quantity, by default of its last name, as a fraction of its largest."""

    def spoil(seen: StepObservation) -> None:
        named: dict[str, Any] = getattr(seen, quantity)
        chosen = name or list(named)[-1]
        changed = np.array(named[chosen])
        changed.reshape(-1)[-1] += by * max(np.abs(x).max() for x in EXPECTATION.exact[quantity].values())
        named[chosen] = changed

    return spoil


def _shifted(name: str, number: int) -> Spoil:
    def spoil(seen: StepObservation) -> None:
        getattr(seen, name)[number] = np.roll(getattr(seen, name)[number], 1)

    return spoil


def _sent(part: int, more: int) -> Spoil:
    def spoil(seen: StepObservation) -> None:
        moved = seen.parts[part].sent
        assert moved is not None
        moved[0] += more

    return spoil


FAULTS: list[tuple[Spoil, str, str]] = [
    (_shifted("tokens", 0), "tokens, labels, positions", "tokens of micro-batch 1 on rank 3"),
    (_shifted("labels", 1), "tokens, labels, positions", "labels of micro-batch 2 on rank 3"),
    (_shifted("positions", 0), "tokens, labels, positions", "positions on rank 3"),
    (lambda seen: seen.parts[0].token_counts.add(8), "no rank has a whole sequence", "had [5, 8] tokens of a sequence"),
    (lambda seen: seen.parts[1].token_counts.clear(), "no rank has a whole sequence", "rank 3 (data 0, context 3) "),
    (_off("logits", 1e-6), "logits", "logits: first micro-batch on rank 3 (data 1, context 1) is "),
    (_off("losses", 1e-6, "step 1"), "loss of step one", "losses: step 1 on rank 3"),
    (_off("losses", 1e-6), "losses, norms of later steps", "losses: step 3 on rank 3"),
    (_off("losses", np.inf), "losses, norms of later steps", "is inf, expected"),
    (_off("gradients", 1e-6), "gradients after step one", "gradients: head.weight on rank 3"),
    (lambda seen: seen.gradients.pop("head.weight"), "gradients after step one", "context 1) is missing"),
    (_off("norms", 1e-6, "step 1"), "norm of the gradients", "norms: step 1 on rank 3"),
    (_off("norms", 1e-6), "losses, norms of later steps", "norms: step 3 on rank 3"),
    (_off("parameters", 1e-6), "parameters after the last", "parameters: head.weight on rank 3"),
    (lambda seen: seen.parameters.update(other=np.zeros(3)), "parameters after the last", "is not expected"),
    (_off("parameters", 1e-14), "ranks alike, bit by bit", "parameters: head.weight is not the same on ranks 0, 3"),
    (_off("logits", 1e-14), "ranks alike, bit by bit", "is not the same on ranks 2, 3"),
    (lambda seen: seen.not_as_clipped.append("norm.weight"), "clipped though not finite", "on rank 3 (data 1, "),
    (_sent(0, -8), "bytes of the steps", "rank 3 (data 1, context 1) sent "),
    (_sent(1, 8), "bytes of the steps", "rank 3 (data 0, context 3) sent "),
    (lambda seen: seen.parts[0].received.clear(), "bytes of the steps", "received 0 bytes"),  # type: ignore[union-attr]
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "title", "said"), FAULTS)
def test_what_is_wrong_is_found_and_named(spoil: Spoil, title: str, said: str) -> None:
    observations = honest(CASE, EXPECTATION)
    spoil(observations[3])
    with pytest.raises(WrongResult) as caught:
        check_step(CASE, EXPECTATION, observations)
    assert broken_by(caught.value) == title
    assert said in str(caught.value) and "worst deviations / allowed: logits " in str(caught.value)


def test_a_step_that_ran_without_a_graph_is_found() -> None:
    expectation = expect_training(COMPILED)
    observations = honest(COMPILED, expectation)
    observations[1].parts[1].graph_runs -= 1
    with pytest.raises(WrongResult, match="rank 1 .* ran 1 compiled graphs in 1 steps; .* it must run 2"):
        check_step(COMPILED, expectation, observations)


def test_a_failure_says_how_large_the_largest_deviation_is() -> None:
    observations = honest(CASE, EXPECTATION)
    observations[0].parts[0].token_counts.add(8)
    _off("gradients", 1e-3)(observations[1])
    with pytest.raises(WrongResult) as caught:
        check_step(CASE, EXPECTATION, observations)
    assert broken_by(caught.value) == "no rank has a whole sequence" and caught.value.ratio == pytest.approx(1e6)
