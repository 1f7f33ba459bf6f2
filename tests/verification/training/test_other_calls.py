"""Calls beside the steps of a training run: all hold on ranks, and what is wrong of them is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.planted_training import plant_digest_by_sum, plant_digest_of_sums_of_rows, plant_no_catching_up
from tests.support.training_cases import small_step
from verification.failures import WrongResult
from verification.run.backends import GlooBackend
from verification.training.call_names import CALLS
from verification.training.rank.all_calls import ALL_CALLS
from verification.training.rank.other_calls import Unlike, refused
from verification.training.step_checks import check_calls
from verification.training.step_expectation import expect_training
from verification.training.step_observation import SeenCall, StepObservation
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

CASE = small_step(4, data=2)


def test_every_name_has_a_call() -> None:
    assert list(CALLS) == [*ALL_CALLS]


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="calls is .*; it must be a list of some of the mean of losses in 16 bits"):
        replace(CASE, calls=("a mask", "a call that nobody knows"))
    assert TrainingCase.from_dict(replace(CASE, calls=("a mask",)).to_dict()).calls == ("a mask",)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_hold_whoever_makes_the_mistake(world: int) -> None:
    backend = GlooBackend(20.0, preload=TRAINING_PRELOAD)
    backend.start(world)
    try:
        for seed in range(world + 1):  # which says who makes it
            data = 2 if world == 4 and seed % 2 else 1
            TRAINING.check(backend, small_step(world, data=data, seed=seed, calls=CALLS))
    finally:
        backend.close()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plant", "name", "told"),
    [
        (plant_digest_by_sum, "a batch in another order than the others'", "must be refused by an error that names"),
        (plant_digest_of_sums_of_rows, "a batch in another order than the others'", "must be refused by an error"),
        (
            plant_no_catching_up,
            "calls after ranks were apart",
            "ranks were apart must hold, got ValueError",
        ),
    ],
)
def test_a_promise_to_several_ranks_that_is_broken_is_told(plant: Callable[[], None], name: str, told: str) -> None:
    backend = GlooBackend(20.0, plant, TRAINING_PRELOAD)
    backend.start(2)
    try:
        with pytest.raises(WrongResult, match=f"calls: {name!r} on rank . .*{told}"):
            for seed in range(10):
                TRAINING.check(backend, small_step(2, seed=seed, calls=(name,)))
    finally:
        backend.close()


def test_a_refusal_must_come_and_name_the_argument() -> None:
    def raises(error: Exception) -> None:
        raise error

    assert refused(("x",), lambda: raises(ValueError("x must be 1"))) == "ValueError: x must be 1"
    with pytest.raises(Unlike, match="must name 'x', got ValueError: y"):
        refused(("x",), lambda: raises(ValueError("y must be 1")))
    with pytest.raises(Unlike, match="must be refused by an error that names 'x', got 3"):
        refused(("x",), lambda: 3)
    with pytest.raises(IndexError):
        refused(("x",), lambda: raises(IndexError("x")))


def _seen(said: dict[int, str], alike: str) -> list[StepObservation]:
    found = []
    for rank in CASE.ranks:
        seen = StepObservation(*CASE.coordinates(rank))
        seen.calls.append(SeenCall("a mask", alike, said.get(rank, "refused")))
        found.append(seen)
    return found


@pytest.mark.parametrize(
    ("said", "alike", "differs"),
    [
        ({}, "mesh", False),
        ({3: "another"}, "mesh", True),
        ({3: "another"}, "context", True),
        ({2: "another", 3: "another"}, "context", False),  # the two of the other data rank
        ({2: "another", 3: "another"}, "mesh", True),
        ({3: "another"}, "", False),
    ],
)
def test_ranks_that_must_be_told_the_same_are_compared(said: dict[int, str], alike: str, differs: bool) -> None:
    expectation = expect_training(CASE)
    if not differs:
        assert check_calls(CASE, expectation, _seen(said, alike)) == {}
        return
    with pytest.raises(WrongResult, match="calls: 'a mask' on rank . .* said 'another'"):
        check_calls(CASE, expectation, _seen(said, alike))


def test_what_is_wrong_of_a_call_is_told() -> None:
    seen = _seen({}, "mesh")
    seen[1].calls[0] = SeenCall("a mask", "", "", "it must be refused")
    with pytest.raises(WrongResult, match=r"calls: 'a mask' on rank 1 \(data 0, context 1\): it must be refused"):
        check_calls(CASE, expect_training(CASE), seen)
