"""Checks and properties of a user's training run, and the features of ModelCases that a report counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from verification.check.properties import EVERY_RANK_ANSWERS, Property
from verification.failures import WrongResult
from verification.models.model_case import MODEL_DTYPES, ModelCase
from verification.models.observation import ModelExpectation, ModelObservation
from verification.models.quantities import QUANTITY_CHECKS, Check, check_quantity, check_results, quantity_properties
from verification.models.step_coverage import CHOICES, DOCUMENTS, MESH, STEP, Groups, choices
from verification.models.strategies import MODEL_CHECKPOINTING, MODEL_LABELS

MODEL_CHECKS: dict[str, Check] = {"start": partial(check_quantity, "start"), **QUANTITY_CHECKS}
MODEL_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("parameters at the start", ("start",)),
    *quantity_properties("gradients at the optimizer"),
)


def check_model_step(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation], only: Sequence[str] = ()
) -> dict[str, float]:
    """Return the worst ratio of each property by title, as `check_results`. only: titles to check; all if empty."""
    names = {name for item in MODEL_PROPERTIES if not only or item.title in only for name in item.checks}
    checks = {name: check for name, check in MODEL_CHECKS.items() if name in names}
    return check_results(MODEL_PROPERTIES, checks, case, *_gathered(case, expectation, observations))


def _gathered(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> tuple[ModelExpectation, list[ModelObservation]]:
    """Return both, the observations with the logits of their data rank's whole sequences, NaN where no rank had a
    token, and norms only if the step returned them on all ranks."""
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
    gathered = [replace(seen, logits={name: whole[seen.data_rank, name] for name in names}) for seen in observations]
    if all(seen.norms for seen in observations):
        return expectation, gathered
    exact = {**expectation.exact, "norms": {}}
    return replace(expectation, exact=exact), [replace(seen, norms={}) for seen in gathered]


def _broken(message: str) -> WrongResult:
    failure = WrongResult(message, "logits", np.inf)
    failure.broken = "logits"
    return failure


MODEL_GROUPS: Groups = {
    "mesh": MESH | {"fewer tokens than ranks": lambda case: case.tokens < case.context},
    "batch": DOCUMENTS | {"padding": lambda case: case.padding}, "step": STEP, **CHOICES,
    "dtype": choices("dtype", MODEL_DTYPES), "checkpointing": choices("checkpointing", MODEL_CHECKPOINTING),
    "labels": choices("labels", MODEL_LABELS),
}  # fmt: skip
