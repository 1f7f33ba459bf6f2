"""Coverage of a sample of TrainingCases: the features that `verification.report.coverage` counts."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from reference.pattern import Branch
from verification.report.coverage import Has
from verification.training import training_case
from verification.training.training_case import TrainingCase
from verification.training.training_model import KINDS, POSITIONS


def _windows(case: TrainingCase) -> set[int | None]:
    """Windows of all branches; None stands for a branch without one."""
    return {branch.window for branch in case.pattern.branches}


def _short_window(case: TrainingCase) -> bool:
    """True if some window is shorter than its branch's segments in the longest document."""
    longest = max(case.documents)
    shortened = ((b.window, min(b.segment_length or longest, longest)) for b in case.pattern.branches)
    return any(window is not None and window < length - 1 for window, length in shortened)


def _has(field: str, choice: str) -> Has:
    return lambda case: attrgetter(field)(case) == choice


TRAINING_GROUPS: dict[str, dict[str, Has]] = {
    "mesh": {
        "data alone": lambda case: case.context == 1 < case.world,
        "context alone": lambda case: case.data == 1 < case.world,
        "data x context": lambda case: case.data > 1 and case.context > 1,
        "context groups apart": lambda case: case.arrangement == "strided" and 1 < case.context < case.world,
        "empty shard": lambda case: 0 in case.shards().counts,
        "uneven shards": lambda case: max(case.shards().counts) - min(case.shards().counts) > 1,
    },
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
        "several documents": lambda case: sum(length > 0 for length in case.documents) > 1,
        "empty document": lambda case: 0 in case.documents,
        "other documents in a later step": lambda case: any(
            case.at(step).documents != case.documents for step in range(1, case.steps)
        ),
        "documents of the modules' own": lambda case: case.own_documents is not None,
    },
    "step": {
        "several micro-batches": lambda case: case.accumulation > 1,
        "several steps": lambda case: case.steps > 1,
        "clipping that bites": lambda case: case.clipping is not None and case.clipping < 1,
        "resumed": lambda case: case.resumed is not None,
        "bucket": lambda case: case.bucket is not None,
        "zero gradients left out": lambda case: case.drops_zeros and case.wrapper == "none",
        "gradients that are not finite": lambda case: case.spoilt is not None,
    },
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "model.kind": KINDS, "model.positions": POSITIONS, "wrapper": training_case.WRAPPERS,
    "checkpointing": training_case.CHECKPOINTING, "dtype": training_case.TRAINING_DTYPES,
    "labels": training_case.LABELS, "handle": training_case.HANDLES, "optimiser": training_case.OPTIMISERS,
    "compiled": training_case.COMPILED, "loss": training_case.LOSSES, "packed_by": training_case.PACKED_BY,
}  # fmt: skip
for _field, _choices in _CHOICES.items():
    _name = _field.removeprefix("model.")
    TRAINING_GROUPS[_name] = {f"{_name} {choice}": _has(_field, choice) for choice in _choices}
