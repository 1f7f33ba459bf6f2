"""Drawn TrainingCases survive JSON, reach everything that a run is to reach, and shrink to the smallest step."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import Phase, find, settings

from reference.pattern import Pattern
from tests.support.training_cases import drawn_from, small_step
from verification.report.coverage import Coverage
from verification.training.drawing import training_cases
from verification.training.material import parameter_shapes
from verification.training.rank.ring_model import LanguageModel
from verification.training.training_case import TrainingCase
from verification.training.training_coverage import TRAINING_GROUPS

DRAWN = 600


def test_every_feature_is_reached() -> None:
    coverage = Coverage(groups=TRAINING_GROUPS)
    for number, case in enumerate(drawn_from(training_cases(4), DRAWN)):
        coverage.add(case)
        assert not case.model.has_steps or case.dtype == "float64"
        assert TrainingCase.from_dict(json.loads(case.to_json())) == case
        if number % 10 == 0:
            named = {name: tuple(x.shape) for name, x in LanguageModel(case).named_parameters()}
            assert named == parameter_shapes(case)
    missing = {name: count for name, count in coverage.to_dict().items() if count < DRAWN * 0.02}
    assert not missing, missing


@pytest.mark.parametrize("world", (1, 3, 6, 8))
def test_meshes_of_any_world_size_are_drawn(world: int) -> None:
    cases = drawn_from(training_cases(world), 200)
    assert {(case.world, case.data * case.context) for case in cases} == {(world, world)}
    assert {case.data for case in cases} == {d for d in range(1, world + 1) if world % d == 0}


def test_the_smallest_case_is_one_that_a_person_would_write() -> None:
    chosen = settings(database=None, phases=[Phase.generate, Phase.shrink])
    case = find(training_cases(4), lambda case: True, settings=chosen, random=Random(0))
    assert case == small_step(4, tokens=2, pattern=Pattern.dense())
