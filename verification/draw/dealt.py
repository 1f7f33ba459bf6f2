"""Cases whose ranks hold whole stripes, some of them several: positions are dealt like cards, and a rank has the hands
of others too. Its rows of one segment then lie apart, with those of the other segments between them.

Nothing else that is drawn makes a rank's whole shard one regular tile whose rows are in another order than the shard's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from verification.case import Case

MOST_OF_A_STRIPE = 8  # tokens
_rows = st.integers(1, MOST_OF_A_STRIPE)
_twice = st.sampled_from((1, 1, 2))
_documents = st.booleans()


def dealt(draw: st.DrawFn, case: Case) -> Case:
    """On two ranks or more: there are as many stripes as ranks, and a segment, or a document, has one token of each, or
    two. Cuts lie between stripes, so that a rank holds none, one, or several.
    """
    size, length = len(case.ranks), draw(_rows)
    cut = st.integers(0, size)
    held = sorted(draw(cut) for _ in range(size - 1))
    segment = size * draw(_twice)
    tokens = segment * length
    causal, packed = case.pattern.causal, draw(_documents)
    lengths = (segment,) * length if packed else None
    return replace(
        case, tokens=tokens, order="striped", cuts=_edges(held, tokens // size, tokens),
        pattern=Pattern((Branch(None if packed else segment),), causal, lengths),
        bucket=None if case.bucket is None else max(case.bucket, tokens),
    )  # fmt: skip


def _edges(held: Sequence[int], stripe: int, tokens: int) -> tuple[int, ...]:
    """Cuts after so many stripes of that many tokens."""
    return (0, *(count * stripe for count in held), tokens)
