"""Hypothesis strategies that draw ServingCases: lengths that end at a turn of the ranks or one token beside it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from verification.case import DTYPES
from verification.serving.serving_case import ServingCase

Draw = st.DrawFn
_blocks, _slots, _numbers = st.sampled_from((1, 2, 3, 4, 8, 16)), st.integers(1, 4), st.integers(1, 5)
_moves = st.sampled_from(("decode", "chunk", "idle", "to the end of a block", "new request"))
_few, _beside, _turns, _flags = st.integers(1, 9), st.integers(-1, 1), st.integers(0, 3), st.booleans()
_kv_heads, _groups, _dims = st.sampled_from((1, 2)), st.sampled_from((1, 2, 3)), st.sampled_from((1, 4, 5, 16))
_value_dims, _scales = st.sampled_from((None, None, None, 3, 24)), st.sampled_from((None, None, None, 0.3, 2.0))
# fp32 most often: in 16 bits small faults hide.
_dtypes = st.sampled_from(("float32", "float32", "float32", *DTYPES))
_replicated, _strided = (st.sampled_from((False, False, True)) for _ in range(2))
_seeds = st.integers(0, 2**16)


@st.composite
def serving_cases(draw: Draw, world: int) -> ServingCase:
    """Draw ServingCases on so many ranks."""
    block, kv_heads = draw(_blocks), draw(_kv_heads)
    return ServingCase(
        world=world, block=block, calls=_calls(draw, block, world), kv_heads=kv_heads, heads=kv_heads * draw(_groups),
        head_dim=draw(_dims), value_dim=draw(_value_dims), scale=draw(_scales), dtype=draw(_dtypes),
        replicated=draw(_replicated), strided=draw(_strided), seed=draw(_seeds),
    )  # fmt: skip


def _calls(draw: Draw, block: int, world: int) -> tuple[tuple[int, ...], ...]:
    lengths, calls = [0] * draw(_slots), list[tuple[int, ...]]()
    for _ in range(draw(_numbers)):
        row = [_new_tokens(draw, length, block, world) for length in lengths]
        if not any(row):
            row[0] = 1
        lengths = [abs(new) if new < 0 else length + new for new, length in zip(row, lengths, strict=True)]
        calls.append(tuple(row))
    return tuple(calls)


def _new_tokens(draw: Draw, length: int, block: int, world: int) -> int:
    """Return a slot's entry of a call. length: of its request so far."""
    move: Any = draw(_moves)
    if move in ("idle", "decode"):
        return int(move == "decode")
    if move == "chunk":
        return draw(_few)
    fresh = 0 if move == "new request" else length
    end = (fresh // block + 1) * block + draw(_turns) * block * world + draw(_beside)
    new = max(1, end - fresh)
    return -new if move == "new request" and length else new
