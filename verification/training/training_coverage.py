"""Coverage of a sample of TrainingCases: the features that `verification.report.coverage` counts."""

from __future__ import annotations

from dataclasses import replace

from reference.pattern import Branch
from verification.models.step_case import CHECKPOINTING, LABELS, STEP_DTYPES
from verification.models.step_coverage import CHOICES, DOCUMENTS, MESH, STEP, Groups, choices
from verification.training.training_case import COMPILED, HANDLES, LOSSES, PACKED_BY, TrainingCase
from verification.training.training_model import KINDS, POSITIONS


def _windows(case: TrainingCase) -> set[int | None]:
    """Windows of all branches; None stands for a branch without one."""
    return {branch.window for branch in case.pattern.branches}


def _short_window(case: TrainingCase) -> bool:
    """True if some window is shorter than its branch's segments in the longest document."""
    longest = max(case.documents)
    shortened = ((b.window, min(b.segment_length or longest, longest)) for b in case.pattern.branches)
    return any(window is not None and window < length - 1 for window, length in shortened)


TRAINING_GROUPS: Groups = {
    "mesh": MESH,
    "model": {
        "GQA": lambda case: case.model.kv_heads < case.model.heads,
        "several layers": lambda case: case.model.layers > 1,
        "tied weights": lambda case: case.model.tied,
        "norm of queries and keys": lambda case: case.model.qk_norm,
        "subln": lambda case: case.model.subln,
        "scale": lambda case: case.model.scale is not None,
        "two rotary bases": lambda case: case.model.bases == 2 and case.model.positions == "rotary",
        "causal": lambda case: case.pattern.causal,
        "dilated or in segments": lambda case: any(replace(b, window=None) != Branch() for b in case.pattern.branches),
        "window": lambda case: _windows(case) != {None},
        "window shorter than a segment": _short_window,
        "window that is not causal": lambda case: _windows(case) != {None} and not case.pattern.causal,
        "window in some branches only": lambda case: None in _windows(case) != {None},
        **DOCUMENTS,
        "other documents in a later step": lambda case: any(
            case.at(step).documents != case.documents for step in range(1, case.steps)
        ),
        "documents of the modules' own": lambda case: case.own_documents is not None,
    },
    "step": {
        **STEP,
        "resumed": lambda case: case.resumed is not None,
        "bucket": lambda case: case.bucket is not None,
        "zero gradients left out": lambda case: case.drops_zeros and case.wrapper == "none",
        "gradients that are not finite": lambda case: case.spoilt is not None,
    },
    **CHOICES,
    **{
        field.removeprefix("model."): choices(field, values)
        for field, values in {
            "model.kind": KINDS, "model.positions": POSITIONS, "checkpointing": CHECKPOINTING, "dtype": STEP_DTYPES,
            "labels": LABELS, "handle": HANDLES, "compiled": COMPILED, "loss": LOSSES, "packed_by": PACKED_BY,
        }.items()
    },
}  # fmt: skip
