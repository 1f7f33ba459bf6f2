"""One Case for tests that need any, or one that differs in a field."""

from dataclasses import replace
from typing import Any

from reference.pattern import Pattern
from verification.case import Case


def plain(world: int, **changes: Any) -> Case:
    """Dense attention of 12 tokens on all ranks, in fp32, nothing unusual; with these fields changed."""
    case = Case(
        world=world, group=None, tokens=12, order="contiguous", cuts=None, pattern=Pattern.dense(), batch=1, heads=2,
        kv_heads=2, head_dim=4, dtype="float32", scale=None, score_scale=1.0, values="normal", seed=0, exchange="ring",
        bucket=None, kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    return replace(case, **changes)


PLAIN = plain(1, tokens=5, pattern=Pattern.dense(True), batch=2, seed=3)
