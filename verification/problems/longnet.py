"""Cases with LongNet's proportions, for the long problems and the problem of real size.

Segments n/16, n/8, n/4, n/2, n with dilations 1, 2, 4, 6, 12, as in arXiv 2307.02486, where n = 32768. Causal, heads of
dimension 64, zigzag order.
"""

from __future__ import annotations

from typing import Any

from reference.pattern import Pattern
from verification.case import Case

HEAD_DIM = 64
DILATIONS = (1, 2, 4, 6, 12)
PARTS = (16, 8, 4, 2, 1)
MIN_TOKENS = 16  # tokens: with fewer, the smallest segment would be empty


def longnet(tokens: int, heads: int) -> Pattern:
    return Pattern.longnet([tokens // part for part in PARTS], DILATIONS, heads, causal=True)


def make_case(world: int, tokens: int, pattern: Pattern, **fields: Any) -> Case:
    """Make a Case. fields: heads, kv_heads, dtype, exchange, seed, and those that override the defaults below."""
    defaults: dict[str, Any] = {
        "group": None, "order": "zigzag", "cuts": None, "batch": 1, "head_dim": HEAD_DIM, "scale": None,
        "score_scale": 1.0, "values": "normal", "bucket": None, "kernel": "auto", "lse": "returned", "strided": False,
    }  # fmt: skip
    return Case(world=world, tokens=tokens, pattern=pattern, **defaults | fields)
