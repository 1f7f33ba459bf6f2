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
from verification.models.quantities import (
    QUANTITY_CHECKS,
    Check,
    Ratios,
    check_quantity,
    check_results,
    label_of,
    quantity_properties,
)
from verification.models.results import Named
from verification.models.step_coverage import CHOICES, DOCUMENTS, MESH, STEP, Groups, choices
from verification.models.strategies import MODEL_CHECKPOINTING, MODEL_LABELS


def check_buffers(case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]) -> Ratios:
    """Check the buffers that training changes, on a rank or in the one process."""
    for rank, seen in enumerate(observations):
        for name in sorted(set(seen.buffers) ^ set(expectation.exact["buffers"])):
            words = ("changed", "did not") if name in seen.buffers else ("did not change", "did")
            message = f"buffers: {name} on {label_of(case, rank)} {words[0]}; in one process it {words[1]}"
            raise WrongResult(message, "buffers", np.inf)
    return check_quantity("buffers", case, expectation, observations)


MODEL_CHECKS: dict[str, Check] = {
    "start": partial(check_quantity, "start"), **QUANTITY_CHECKS, "buffers": check_buffers,
}  # fmt: skip
MODEL_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("parameters at the start", ("start",)),
    *quantity_properties("gradients at the optimizer"),
    Property("buffers after the last step", ("buffers",)),
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
    """Return both, the observations with the logits of their data rank's whole sequences, with norms only if the step
    returned them on all ranks, and buffers only if their shape is the same in all processes, and no rows of the one process are
    padded: it would count that."""
    whole = {
        (d, name): np.full_like(x[0], np.nan)
        for name, x in expectation.exact["logits"].items()
        for d in range(case.data)
    }
    absent = {at: np.ones(x.shape[1], bool) for at, x in whole.items()}
    for seen in observations:
        for (name, logits), held in zip(seen.logits.items(), seen.held, strict=True):
            target = whole[seen.data_rank, name]
            if logits.shape[::2] != target.shape[::2]:
                raise _broken(f"logits: {name} of data rank {seen.data_rank} has shape {logits.shape}")
            target[:, held] = logits
            absent[seen.data_rank, name][held] = False
    for (d, name), tokens in absent.items():
        if tokens.any():
            raise _broken(f"logits: no rank recorded the logits of token {tokens.argmax()} of {name} of data rank {d}")
    norms = all(seen.norms for seen in observations)
    shapes = [seen.shapes for seen in observations]
    padded = len(set(filter(None, case.documents))) > 1
    same = {n for n, shape in expectation.shapes.items() if not padded and all(x.get(n) == shape for x in shapes)}

    def comparable(buffers: Named) -> Named:
        return {name: x for name, x in buffers.items() if name in same}

    names, exact = expectation.exact["logits"], dict(expectation.exact)
    exact |= {"norms": exact["norms"] if norms else {}, "buffers": comparable(exact["buffers"])}
    return replace(expectation, exact=exact), [
        replace(
            seen, logits={name: whole[seen.data_rank, name] for name in names},
            norms=seen.norms if norms else {}, buffers=comparable(seen.buffers),
        )
        for seen in observations
    ]  # fmt: skip


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
