"""Properties of a training run, as the report lists them: a failure names the broken one."""

from __future__ import annotations

from collections.abc import Sequence

from verification.check.properties import EVERY_RANK_ANSWERS, Property, run_checks
from verification.failures import WrongResult
from verification.training.step_checks import STEP_CHECKS, deviations
from verification.training.step_expectation import StepExpectation
from verification.training.step_observation import StepObservations
from verification.training.training_case import TrainingCase

STEP_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("tokens, labels, positions", ("batches",)),
    Property("no rank has a whole sequence", ("sharded",)),
    Property("logits", ("logits",)),
    Property("loss of step one", ("first loss",)),
    Property("gradients after step one", ("gradients",)),
    Property("norm of the gradients", ("first norm",), concerns=lambda case: case.clipping is not None),
    Property("losses, norms of later steps", ("later losses", "later norms"), concerns=lambda case: case.steps > 1),
    Property("parameters after the last", ("parameters",)),
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
    """Return the worst ratio (deviation / allowed) of each property by its title; 0 is exact. checks: names of the
    checks to make. Raises the first failure; its `broken` is the property's title, and its message lists the worst
    ratio of every quantity."""
    try:
        selected = {name: STEP_CHECKS[name] for name in checks}
        return run_checks(STEP_PROPERTIES, selected, case, expectation, observations)
    except WrongResult as failure:
        worst = deviations(expectation, observations)
        listed = ", ".join(f"{quantity} {ratio:.3g}" for quantity, ratio in worst.items())
        error = WrongResult(f"{failure}\nworst deviations / allowed: {listed}", failure.quantity, max(worst.values()))
        error.broken = failure.broken
        raise error from None
