"""Seeded defects of the composition are searched for with TrainingCases, and killed."""

from __future__ import annotations

import pytest

from verification.mutants import trials
from verification.mutants.catalogue import by_name
from verification.run.backends import GlooBackend
from verification.training.training_case import TrainingCase
from verification.training.training_run import TRAINING, TRAINING_PRELOAD

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_a_defect_of_the_composition_is_killed_and_its_case_holds_without_it() -> None:
    name = "gradients-averaged-twice"
    assert by_name(name).place == ("training", "gloo")
    outcome = trials.try_defect(name, seed=3, limit=40)
    assert outcome.killed and outcome.check == "gradients after step one"
    assert outcome.ratio is not None and outcome.ratio > 1e6, "many decades above what is allowed"
    assert outcome.case is not None
    case = TrainingCase.from_dict(outcome.case["training"])
    backend = GlooBackend(20.0, preload=TRAINING_PRELOAD)
    backend.start(case.world)
    try:
        TRAINING.check(backend, case)
    finally:
        backend.close()
