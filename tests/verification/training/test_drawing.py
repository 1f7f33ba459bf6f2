"""Drawn TrainingCases reach everything that a run is to reach, and shrink to the smallest model and mesh."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, find, settings

from reference.pattern import Branch
from tests.support.training_cases import drawn_from
from verification.report.coverage import Coverage
from verification.training.drawing import training_cases
from verification.training.training_coverage import TRAINING_GROUPS

DRAWN = 600


def test_every_feature_is_reached() -> None:
    coverage = Coverage(groups=TRAINING_GROUPS)
    for case in drawn_from(training_cases(4), DRAWN):
        coverage.add(case)
        assert not case.model.has_steps or case.dtype == "float64"
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
    model = case.model
    assert (case.data, case.tokens, case.batch, case.order, case.cuts) == (1, 2, 1, "contiguous", None)
    assert (case.wrapper, case.checkpointing, case.accumulation, case.steps) == ("none", "none", 1, 1)
    assert (case.dtype, case.optimiser, case.clipping, case.labels) == ("float64", "sgd", None, "all")
    assert (model.kind, model.layers, model.dim, model.heads, model.head_dim) == ("sdpa", 1, 4, 1, 2)
    assert case.pattern.branches == (Branch(),) and (case.handle, case.compiled) == ("recorded", "no")
    assert (case.loss, case.packed_by, case.drops_zeros, case.spoilt) == ("mean", "batch", False, None)
    assert (model.scale, model.bases) == (None, 1)
