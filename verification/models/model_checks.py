"""Checks and properties of a user's training run, and the features of ModelCases that a report counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from verification.check.properties import EVERY_RANK_ANSWERS, Property
from verification.failures import WrongResult
from verification.models.batches import global_batch
from verification.models.model_case import MODEL_DTYPES, ModelCase
from verification.models.observation import ModelExpectation, ModelObservation
from verification.models.quantities import (
    QUANTITY_CHECKS,
    Check,
    Ratios,
    check_quantity,
    check_results,
    label_rank,
    quantity_properties,
)
from verification.models.results import Array, Named
from verification.models.step_coverage import CHOICES, DOCUMENTS, MESH, STEP, Groups, choices
from verification.models.strategies import MODEL_CHECKPOINTING, MODEL_LABELS


def check_buffers(case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]) -> Ratios:
    """Check the buffers that training changes, on a rank or in the one process."""
    for rank, seen in enumerate(observations):
        for name in sorted(set(seen.buffers) ^ set(expectation.exact["buffers"])):
            words = ("changed", "did not") if name in seen.buffers else ("did not change", "did")
            message = f"buffers: {name} on {label_rank(case, rank)} {words[0]}; in one process it {words[1]}"
            raise WrongResult(message, "buffers", np.inf)
    return check_quantity("buffers", case, expectation, observations)


MODEL_CHECKS: dict[str, Check] = {
    "start": partial(check_quantity, "start"), **QUANTITY_CHECKS, "buffers": check_buffers,
    "evaluation": partial(check_quantity, "evaluation"),
}  # fmt: skip
MODEL_PROPERTIES = (
    EVERY_RANK_ANSWERS,
    Property("parameters at the start", ("start",)),
    *quantity_properties("gradients at the optimizer"),
    Property("buffers after the last step", ("buffers",)),
    Property("evaluation", ("evaluation",), concerns=lambda case: case.held > 0),
)


def check_model_step(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation], only: Sequence[str] = ()
) -> dict[str, float]:
    """Return the worst ratio of each property by title, as `check_results`. only: titles to check; all if empty."""
    names = {name for item in MODEL_PROPERTIES if not only or item.title in only for name in item.checks}
    checks = {name: check for name, check in MODEL_CHECKS.items() if name in names}
    gathered = _after_the_checkpoint if case.resumed_after else _gathered
    return check_results(MODEL_PROPERTIES, checks, case, *gathered(case, expectation, observations))


def _after_the_checkpoint(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> tuple[ModelExpectation, list[ModelObservation]]:
    """Return both without the logits and gradients of the first step, and the losses and norms before the resume."""
    norms, exact = all(seen.norms for seen in observations), dict(expectation.exact)
    later = [f"step {step + 1}" for step in range(case.resumed_after, case.steps)]
    exact |= {"logits": {}, "gradients": {}, "losses": {name: exact["losses"][name] for name in later}}
    exact["norms"] = {name: exact["norms"][name] for name in later} if norms else {}
    return replace(expectation, exact=exact), [
        replace(seen, logits={}, gradients={}, norms=seen.norms if norms else {}) for seen in observations
    ]


def _gathered(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> tuple[ModelExpectation, list[ModelObservation]]:
    """Return both, the observations with the logits of their data rank's whole sequences, with norms only if the step
    returned them on all ranks, and with buffers that can be compared."""
    whole, norms = _whole_logits(case, expectation, observations), all(seen.norms for seen in observations)
    same = _comparable_buffers(case, expectation, observations)
    padding = global_batch(case, 0).padding.numpy()
    exact = {
        "logits": _without_padding(padding.swapaxes(0, 1), expectation.exact["logits"]),
        "norms": expectation.exact["norms"] if norms else {},
        "buffers": {name: x for name, x in expectation.exact["buffers"].items() if name in same},
    }
    logits = [_without_padding(padding[d], named) for d, named in enumerate(whole)]
    return replace(expectation, exact={**expectation.exact, **exact}), [
        replace(
            seen,
            logits=logits[seen.data_rank],
            norms=seen.norms if norms else {},
            buffers={name: x for name, x in seen.buffers.items() if name in same},
        )
        for seen in observations
    ]


def _without_padding(padding: Array, logits: Named) -> Named:
    """Return logits with zeros at padding, where they have no meaning, and a mask changes them."""
    return {name: np.where(pad[..., None], 0.0, x) for pad, (name, x) in zip(padding, logits.items(), strict=True)}


def _whole_logits(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> list[Named]:
    """Return the logits of each data rank's whole sequences. Raises WrongResult for a token that no rank recorded."""
    whole = [{name: np.zeros_like(x[0]) for name, x in expectation.exact["logits"].items()} for _ in range(case.data)]
    recorded = {(d, name): np.zeros(case.tokens, bool) for d, named in enumerate(whole) for name in named}
    for seen in observations:
        for (name, logits), held in zip(seen.logits.items(), seen.held, strict=True):
            target = whole[seen.data_rank][name]
            if logits.shape[::2] != target.shape[::2]:
                raise _broken(f"logits: {name} of data rank {seen.data_rank} has shape {logits.shape}")
            target[:, held], recorded[seen.data_rank, name][held] = logits, True
    for (d, name), tokens in recorded.items():
        if not tokens.all():
            raise _broken(f"logits: no rank recorded the logits of token {tokens.argmin()} of {name} of data rank {d}")
    return whole


def _comparable_buffers(
    case: ModelCase, expectation: ModelExpectation, observations: Sequence[ModelObservation]
) -> set[str]:
    """Return the names of buffers that kept the same shape in all processes: a cache grows. None if documents differ in
    length: the one process pads them, and may count the padding."""
    if len(set(filter(None, case.documents))) > 1:
        return set()
    shapes = [seen.shapes for seen in observations]
    return {name for name, shape in expectation.shapes.items() if all(x.get(name) == shape for x in shapes)}


def _broken(message: str) -> WrongResult:
    failure = WrongResult(message, "logits", np.inf)
    failure.broken = "logits"
    return failure


MODEL_GROUPS: Groups = {
    "mesh": MESH | {"fewer tokens than ranks": lambda case: case.tokens < case.context},
    "batch": DOCUMENTS | {"padding": lambda case: case.padding}, "step": STEP, **CHOICES,
    "run": {
        "evaluation": lambda case: case.held > 0, "resume": lambda case: case.resumed_after > 0,
        "resume on other ranks": lambda case: case.resumed_after and case.context_before != case.context,
    },
    "dtype": choices("dtype", MODEL_DTYPES), "checkpointing": choices("checkpointing", MODEL_CHECKPOINTING),
    "labels": choices("labels", MODEL_LABELS),
}  # fmt: skip
