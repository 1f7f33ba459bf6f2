"""What a sample of TrainingCases covers: features as `verification.report.coverage` counts them."""

from __future__ import annotations

from dataclasses import replace

from reference.pattern import Branch
from verification.report.coverage import Has
from verification.training.training_case import (
    CHECKPOINTING,
    COMPILED,
    HANDLES,
    LABELS,
    LOSSES,
    OPTIMISERS,
    PACKED_BY,
    TRAINING_DTYPES,
    WRAPPERS,
    TrainingCase,
)
from verification.training.training_model import KINDS, POSITIONS


def _counts(case: TrainingCase) -> tuple[int, ...]:
    return case.shards().counts


def _apart(case: TrainingCase) -> bool:
    """The ranks of a context group are not neighbours."""
    return case.arrangement == "strided" and 1 < case.context < case.world


def _windows(case: TrainingCase) -> set[int | None]:
    """Of all branches; None for a branch without one."""
    return {branch.window for branch in case.pattern.branches}


def _short_window(case: TrainingCase) -> bool:
    """Some window reaches less far than its branch's segments, in the longest document."""
    longest = max(case.documents)
    shortened = ((b.window, min(b.segment_length or longest, longest)) for b in case.pattern.branches)
    return any(window is not None and window < length - 1 for window, length in shortened)


def _in_model(name: str, choice: str) -> Has:
    return lambda case: getattr(case.model, name) == choice


def _in_case(name: str, choice: str) -> Has:
    return lambda case: getattr(case, name) == choice


TRAINING_GROUPS: dict[str, dict[str, Has]] = {
    "mesh": {
        "data alone": lambda case: case.context == 1 < case.world,
        "context alone": lambda case: case.data == 1 < case.world,
        "data x context": lambda case: case.data > 1 and case.context > 1,
        "context groups apart": _apart,
        "empty shard": lambda case: 0 in _counts(case),
        "uneven shards": lambda case: max(_counts(case)) - min(_counts(case)) > 1,
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
_OF_MODELS: dict[str, tuple[str, ...]] = {"kind": KINDS, "positions": POSITIONS}
_OF_CASES: dict[str, tuple[str, ...]] = {
    "wrapper": WRAPPERS, "checkpointing": CHECKPOINTING, "dtype": TRAINING_DTYPES, "labels": LABELS,
    "handle": HANDLES, "optimiser": OPTIMISERS, "compiled": COMPILED, "loss": LOSSES,
    "packed_by": PACKED_BY,
}  # fmt: skip
for _made, _of in ((_in_model, _OF_MODELS), (_in_case, _OF_CASES)):
    for _name, _choices in _of.items():
        TRAINING_GROUPS[_name] = {f"{_name} {choice}": _made(_name, choice) for choice in _choices}
