"""Each check finds what it is for, and the failure names the property that is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.training_cases import small_model, small_step
from verification.check.properties import broken_by
from verification.failures import WrongResult
from verification.training.material import global_batch
from verification.training.step_checks import STEP_CHECKS
from verification.training.step_expectation import StepExpectation, bytes_sent, expect_training, graph_runs
from verification.training.step_observation import PartObservation, StepObservation
from verification.training.step_properties import STEP_PROPERTIES, check_step
from verification.training.training_case import TrainingCase

CASE = small_step(4, data=2, accumulation=2, clipping=0.1, steps=2, cuts=(0, 3, 8))


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
        for part, sent in zip(case.parts, expectation.sent, strict=True):
            index = part.coordinates(rank)[1]
            moved = dict(enumerate(sent[index].tolist())), dict(enumerate(sent[:, index].tolist()))
            runs = expectation.graph_runs[len(seen.parts)]
            seen.parts.append(PartObservation(index, {part.shards().counts[index]}, *moved, runs))
        for quantity, named in copy.deepcopy(expectation.exact).items():
            whole = {name: x[data] for name, x in named.items()} if quantity == "logits" else named
            getattr(seen, quantity).update(whole)
        found.append(seen)
    return found


EXPECTATION = expect_training(CASE)


def test_every_check_belongs_to_a_property() -> None:
    for name in STEP_CHECKS:
        assert any(name in one.checks for one in STEP_PROPERTIES), name


def test_what_is_right_holds() -> None:
    ratios = check_step(CASE, EXPECTATION, honest(CASE, EXPECTATION))
    assert set(ratios) == {one.title for one in STEP_PROPERTIES if one.concerns(CASE)}
    assert not any(ratios.values())


def _shift_labels(seen: StepObservation) -> None:
    seen.labels[1] = np.roll(seen.labels[1], 1)


def _swap_positions(seen: StepObservation) -> None:
    seen.positions[0] = np.arange(len(seen.positions[0])) + 1


def _whole_sequence(seen: StepObservation) -> None:
    seen.parts[0].token_counts.add(8)


def _no_token(seen: StepObservation) -> None:
    seen.parts[0].token_counts = set()


def _off(quantity: str, by: float) -> Callable[[StepObservation], None]:
    """Add to one number of a quantity, as a fraction of its largest."""

    def spoil(seen: StepObservation) -> None:
        named: dict[str, Any] = getattr(seen, quantity)
        name = list(named)[-1]
        changed = np.array(named[name])
        changed.reshape(-1)[-1] += by * max(np.abs(x).max() for x in EXPECTATION.exact[quantity].values())
        named[name] = changed

    return spoil


def _missing(seen: StepObservation) -> None:
    del seen.gradients["head.weight"]


def _too_many(seen: StepObservation) -> None:
    seen.parameters["other"] = np.zeros(3)


def _infinite(seen: StepObservation) -> None:
    seen.losses["step 2"] = np.array(np.inf)


def _first_loss(seen: StepObservation) -> None:
    seen.losses["step 1"] = seen.losses["step 1"] * (1 + 1e-8)


def _first_norm(seen: StepObservation) -> None:
    seen.norms["step 1"] = seen.norms["step 1"] * (1 + 1e-8)


def _last_bit(seen: StepObservation) -> None:
    seen.parameters["head.weight"] = np.nextafter(seen.parameters["head.weight"], np.inf)


def _fewer_bytes(seen: StepObservation) -> None:
    assert seen.parts[0].sent is not None
    seen.parts[0].sent[1 - seen.index] -= 8


def _no_bytes(seen: StepObservation) -> None:
    seen.parts[0].received = {}


def _left_as_they_are(seen: StepObservation) -> None:
    seen.not_as_clipped = ["norm.weight"]


@pytest.mark.parametrize(
    ("spoil", "title", "said"),
    [
        (_shift_labels, "tokens, labels, positions", "labels of micro-batch 2 on rank 3"),
        (_swap_positions, "tokens, labels, positions", "positions on rank 3"),
        (_whole_sequence, "no rank has a whole sequence", "had [5, 8] tokens of a sequence of 8"),
        (_no_token, "no rank has a whole sequence", "had [] tokens"),
        (_off("logits", 1e-6), "logits", "logits: first micro-batch on rank 3 (data 1, context 1) is "),
        (_off("losses", 1e-6), "losses, norms of later steps", "losses: step 2 on rank 3"),
        (_off("gradients", 1e-6), "gradients after step one", "gradients: head.weight on rank 3"),
        (_off("norms", 1e-6), "losses, norms of later steps", "norms: step 2 on rank 3"),
        (_off("parameters", 1e-6), "parameters after the last", "parameters: head.weight on rank 3"),
        (_missing, "gradients after step one", "gradients: head.weight on rank 3 (data 1, context 1) is missing"),
        (_too_many, "parameters after the last", "other on rank 3 (data 1, context 1) is not expected"),
        (_infinite, "losses, norms of later steps", "is inf, expected"),
        (_first_loss, "loss of step one", "losses: step 1 on rank 3"),
        (_first_norm, "norm of the gradients", "norms: step 1 on rank 3"),
        (_last_bit, "ranks alike, bit by bit", "parameters: head.weight is not the same on ranks 0, 3"),
        (_off("losses", 1e-14), "ranks alike, bit by bit", "losses: step 2 is not the same on ranks 0, 3"),
        (_off("logits", 1e-14), "ranks alike, bit by bit", "is not the same on ranks 2, 3"),
        (_left_as_they_are, "clipped though not finite", "on rank 3 (data 1, context 1), where"),
        (_fewer_bytes, "bytes of the steps", "rank 3 (data 1, context 1) sent "),
        (_no_bytes, "bytes of the steps", "rank 3 (data 1, context 1) received 0 bytes"),
    ],
)
def test_what_is_wrong_is_found_and_named(spoil: Callable[[StepObservation], None], title: str, said: str) -> None:
    observations = honest(CASE, EXPECTATION)
    spoil(observations[3])
    with pytest.raises(WrongResult) as caught:
        check_step(CASE, EXPECTATION, observations)
    assert broken_by(caught.value) == title
    assert said in str(caught.value)
    assert "worst deviations / allowed: logits " in str(caught.value)


def test_a_failure_says_how_large_the_largest_deviation_is() -> None:
    observations = honest(CASE, EXPECTATION)
    _whole_sequence(observations[0])
    _off("gradients", 1e-3)(observations[1])
    with pytest.raises(WrongResult) as caught:
        check_step(CASE, EXPECTATION, observations)
    assert broken_by(caught.value) == "no rank has a whole sequence"
    assert caught.value.ratio == pytest.approx(1e6)


def test_bytes_that_were_not_recorded_are_not_compared() -> None:
    case = small_step(2, handle="group")
    expectation = expect_training(case)
    observations = honest(case, expectation)
    for seen in observations:
        seen.parts[0].sent = seen.parts[0].received = None
    assert "bytes of the steps" not in check_step(case, expectation, observations)


COMPILED: dict[str, Any] = {"handle": "mesh", "compiled": "aot_eager"}


def test_a_step_that_ran_without_a_graph_is_found() -> None:
    case = small_step(2, accumulation=2, steps=2, resumed="zigzag", **COMPILED)
    expectation = expect_training(case)
    observations = honest(case, expectation)
    for seen in observations:
        seen.parts = [replace(part, sent=None, received=None) for part in seen.parts]
    assert "runs of compiled graphs" in check_step(case, expectation, observations)
    observations[1].parts[1].graph_runs -= 1
    with pytest.raises(WrongResult, match="rank 1 .* ran 1 compiled graphs in 1 steps; .* it must run 2") as caught:
        check_step(case, expectation, observations)
    assert broken_by(caught.value) == "runs of compiled graphs"


def test_graphs_of_layers_run_once_more_where_they_are_computed_again() -> None:
    model = small_model(layers=3)
    assert graph_runs(small_step(2, model=model, wrapper="ddp")) == 0
    for wrapper, checkpointing, expected in (
        ("ddp", "none", 4), ("none", "reentrant", 4), ("fsdp2", "none", 12), ("hsdp2", "selective", 24),
    ):  # fmt: skip
        case = small_step(2, model=model, wrapper=wrapper, checkpointing=checkpointing, accumulation=4, **COMPILED)
        assert graph_runs(case) == expected, wrapper


def test_bytes_count_what_checkpointing_computes_again() -> None:
    once, twice = (bytes_sent(small_step(2, checkpointing=how), gathered=True) for how in ("selective", "reentrant"))
    keys = 4 * 2 * 2 * 8  # of 4 tokens: keys and values of 2 numbers of 8 bytes
    gathered = 4 * 11 * 8
    assert once[0, 1] == gathered + 2 * keys  # rank 1 needs the first half of a causal sequence, forward and backward
    assert once[1, 0] == gathered + keys  # and returns its gradients
    assert twice[0, 1] == once[0, 1] + keys and twice[1, 0] == once[1, 0]
    layers = bytes_sent(small_step(2, accumulation=3, steps=2), gathered=True)
    assert layers[1, 0] == gathered + 6 * keys


RESUMED = small_step(4, data=2, accumulation=2, steps=3, resumed="striped")
RESUMED_EXPECTATION = expect_training(RESUMED)


def test_both_parts_of_a_run_that_is_resumed_are_looked_at() -> None:
    observations = honest(RESUMED, RESUMED_EXPECTATION)
    assert [seen.index for seen in observations] == [0, 1, 0, 1]
    assert [seen.parts[1].index for seen in observations] == [0, 1, 2, 3]
    assert not any(check_step(RESUMED, RESUMED_EXPECTATION, observations).values())


def _as_many_tokens_as_before(seen: PartObservation) -> None:
    seen.token_counts = {4}


def _bytes_of_before(seen: PartObservation) -> None:
    assert seen.sent is not None
    seen.sent[0] += 8


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            _as_many_tokens_as_before,
            "on rank 3 (data 0, context 3) the model's modules had [4] tokens of a sequence of 8",
        ),
        (_bytes_of_before, "rank 3 (data 0, context 3) sent "),
    ],
)
def test_what_is_wrong_after_a_resume_is_found(spoil: Callable[[PartObservation], None], said: str) -> None:
    observations = honest(RESUMED, RESUMED_EXPECTATION)
    spoil(observations[3].parts[1])
    with pytest.raises(WrongResult) as caught:
        check_step(RESUMED, RESUMED_EXPECTATION, observations)
    assert said in str(caught.value)
