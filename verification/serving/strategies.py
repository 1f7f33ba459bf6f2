"""Hypothesis strategies that draw ServingCases: lengths that end at a turn of the ranks or one token beside it."""

from __future__ import annotations

from hypothesis import strategies as st

from verification.case import DTYPES
from verification.serving.serving_case import ServingCase

_kinds = st.sampled_from(("decode", "chunk", "idle", "to the end of a block", "new request"))
# Of fixed width, so that a call or a slot less leaves the other draws as they are.
_moves = st.tuples(*[st.tuples(_kinds, st.integers(1, 9), st.integers(0, 3), st.integers(-1, 1))] * 4)
_rarely = st.sampled_from((False, False, True))


@st.composite
def serving_cases(draw: st.DrawFn, world: int) -> ServingCase:
    """Draw ServingCases on so many ranks."""
    head_dim, block = draw(st.sampled_from((1, 4, 5, 16))), draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    kv_heads = draw(st.integers(1, 2))
    lengths, calls = [0] * draw(st.integers(1, 4)), list[tuple[int, ...]]()
    for moves in draw(st.lists(_moves, min_size=1, max_size=5)):
        row = [_new_tokens(length, block * world, block, *move) for move, length in zip(moves, lengths, strict=False)]
        row[0] = row[0] or int(not any(row))
        lengths = [-new if new < 0 else length + new for new, length in zip(row, lengths, strict=True)]
        calls.append(tuple(row))
    return ServingCase(
        world=world, block=block, calls=tuple(calls), kv_heads=kv_heads, heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=head_dim, value_dim=draw(st.sampled_from((head_dim, head_dim, 3, 24))),
        scale=draw(st.sampled_from((head_dim**-0.5, head_dim**-0.5, 0.3, 2.0))), strided=draw(_rarely),
        dtype=draw(st.sampled_from(("float32", "float32", "float32", *DTYPES))),  # in 16 bits small faults hide
        replicated=draw(_rarely), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


def _new_tokens(length: int, turn: int, block: int, kind: str, few: int, turns: int, beside: int) -> int:
    """Return a slot's entry of a call. length: of its request so far."""
    if kind in ("idle", "decode", "chunk"):
        return {"idle": 0, "decode": 1, "chunk": few}[kind]
    begin = 0 if kind == "new request" else length
    new = max(1, (begin // block + 1) * block + turns * turn + beside - begin)
    return -new if kind == "new request" and length else new
