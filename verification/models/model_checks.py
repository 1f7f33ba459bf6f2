"""Checks and properties of a user's training run. Comparisons are those of `verification.training.step_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from verification.check.properties import EVERY_RANK_ANSWERS, Property, run_checks
from verification.failures import WrongResult
from verification.models.model_case import MODEL_CHECKPOINTING, MODEL_DTYPES, MODEL_LABELS, ModelCase
from verification.models.observation import ModelExpectation, ModelObservation
from verification.report.coverage import Has
from verification.training.step_checks import check_quantity, deviations
from verification.training.training_coverage import TRAINING_GROUPS

MODEL_CHECKS = {  # causes before effects
    "start": partial(check_quantity, "start"),
    "logits": partial(check_quantity, "logits"),
    "first loss": partial(check_quantity, "losses", later=False),
    "gradients": partial(check_quantity, "gradients"),
    "first norm": partial(check_quantity, "norms", later=False),
    "later losses": partial(check_quantity, "losses", later=True),
    "later norms": partial(check_quantity, "norms", later=True),
    "parameters": partial(check_quantity, "parameters"),
}
MODEL_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("parameters at the start", ("start",)),
    Property("logits", ("logits",)),
    Property("loss of step one", ("first loss",)),
    Property("gradients at the optimizer", ("gradients",)),
    Property("norm of the gradients", ("first norm",), concerns=lambda case: case.clipping is not None),
    Property("losses, norms of later steps", ("later losses", "later norms"), concerns=lambda case: case.steps > 1),
    Property("parameters after the last", ("parameters",)),
)


def check_model_step(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation], only: Sequence[str] = ()
) -> dict[str, float]:
    """Return the worst ratio (deviation / allowed) of each property by title. only: titles to check; all if empty.
    Raises WrongResult, whose message lists the worst ratio of every quantity."""
    names = {name for item in MODEL_PROPERTIES if not only or item.title in only for name in item.checks}
    checks = {name: check for name, check in MODEL_CHECKS.items() if name in names}
    gathered = _gathered(case, expectation, observations)
    try:
        return run_checks(MODEL_PROPERTIES, checks, case, expectation, gathered)
    except WrongResult as failure:
        worst = deviations(expectation, gathered)  # type: ignore[arg-type]
        listed = ", ".join(f"{quantity} {ratio:.3g}" for quantity, ratio in worst.items())
        error = WrongResult(f"{failure}\nworst deviations / allowed: {listed}", failure.quantity, max(worst.values()))
        error.broken = failure.broken
        raise error from None


def _gathered(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> list[ModelObservation]:
    """Return the observations with the logits of their data rank's whole sequences, NaN where no rank had a token; and
    norms only where the step returned them."""
    whole = {
        (d, name): np.full_like(x[0], np.nan)
        for name, x in expectation.exact["logits"].items()
        for d in range(case.data)
    }
    for seen in observations:
        for (name, logits), held in zip(seen.logits.items(), seen.held, strict=True):
            target = whole[seen.data_rank, name]
            if logits.shape[::2] != target.shape[::2]:
                raise _broken(f"logits: {name} of data rank {seen.data_rank} has shape {logits.shape}")
            target[:, held] = logits
    names = expectation.exact["logits"]
    without_norms = any(not seen.norms for seen in observations)
    if without_norms:
        expectation.exact["norms"] = {}
    return [
        replace(seen, logits={name: whole[seen.data_rank, name] for name in names},
                norms={} if without_norms else seen.norms)
        for seen in observations
    ]  # fmt: skip


def _broken(message: str) -> WrongResult:
    failure = WrongResult(message, "logits", np.inf)
    failure.broken = "logits"
    return failure


_STEP = ("several micro-batches", "several steps", "clipping that bites")
MODEL_GROUPS: dict[str, dict[str, Has]] = {
    "mesh": TRAINING_GROUPS["mesh"] | {"fewer tokens than ranks": lambda case: case.tokens < case.context},
    "batch": {name: TRAINING_GROUPS["model"][name] for name in ("several documents", "empty document")}
    | {"padding": lambda case: case.padding},
    "step": {name: TRAINING_GROUPS["step"][name] for name in _STEP},
    "wrapper": TRAINING_GROUPS["wrapper"], "optimiser": TRAINING_GROUPS["optimiser"],
}  # fmt: skip
for _field, _choices in {"dtype": MODEL_DTYPES, "checkpointing": MODEL_CHECKPOINTING, "labels": MODEL_LABELS}.items():
    MODEL_GROUPS[_field] = {f"{_field} {x}": TRAINING_GROUPS[_field][f"{_field} {x}"] for x in _choices}
