"""Properties of a training run, as the report lists them: a failure names the broken one."""

from __future__ import annotations

from collections.abc import Sequence

from verification.check.properties import EVERY_RANK_ANSWERS, Property
from verification.models.quantities import check_results, quantity_properties
from verification.training.step_checks import STEP_CHECKS
from verification.training.step_expectation import StepExpectation
from verification.training.step_observation import StepObservations
from verification.training.training_case import TrainingCase

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
