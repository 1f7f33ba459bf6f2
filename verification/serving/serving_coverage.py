"""Coverage of a sample of ServingCases: the features that `verification.report.coverage` counts."""

from __future__ import annotations

from verification.case import DTYPES
from verification.models.step_coverage import Groups, choices
from verification.serving.serving_case import ServingCase


def _entries(case: ServingCase) -> list[tuple[int, int]]:
    """Return (tokens before, new tokens) of each slot with new tokens in each call."""
    return [pair for call in case.calls_of(0) for pair in zip(call.before, call.new, strict=True) if pair[1]]


def _empty_rank(case: ServingCase) -> bool:
    """True if a request's first keys leave a rank without one."""
    return any(before + new <= case.block * (case.world - 1) for before, new in _entries(case))


SERVING_GROUPS: Groups = {
    "calls": {
        "several calls": lambda case: len(case.calls) > 1,
        "several slots": lambda case: len(case.calls[0]) > 1,
        "prefill": lambda case: any(not before and new > 1 for before, new in _entries(case)),
        "prefill in chunks": lambda case: any(before and new > 1 for before, new in _entries(case)),
        "decode": lambda case: any(before and new == 1 for before, new in _entries(case)),
        "slot without new tokens": lambda case: any(0 in row for row in case.calls),
        "slot of a finished request": lambda case: any(new < 0 for row in case.calls for new in row),
    },
    "cache": {
        "blocks of several": lambda case: case.block > 1,
        "rank without a key": lambda case: case.world > 1 and not case.replicated and _empty_rank(case),
        "kept by every rank": lambda case: case.replicated,
    },
    "tensors": {
        "GQA": lambda case: case.kv_heads < case.heads,
        "other head dim of values": lambda case: case.value_dim is not None,
        "scale": lambda case: case.scale is not None,
        "strided": lambda case: case.strided,
    },
    "dtype": choices("dtype", tuple(DTYPES)),
}
