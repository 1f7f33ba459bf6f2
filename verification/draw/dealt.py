"""Cases whose positions are dealt like cards: a rank has three hands, one after the other, and a segment, or a
document, has one card of each. So a rank's rows of one segment lie apart, with those of other segments between them.

Nothing else that is drawn makes a rank's whole shard one regular tile whose rows are in another order than the shard's.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.shards import HANDS
from verification.case import Case

MOST_TOKENS = 60  # for few ranks
_twice = st.sampled_from((1, 1, 1, 2))
_packed = st.booleans()


def dealt(draw: st.DrawFn, case: Case) -> Case:
    """Two segments at least, of one token of each hand, or of two."""
    hands = HANDS * len(case.ranks)
    segment = hands * draw(_twice)
    count = draw(st.integers(2, max(2, MOST_TOKENS // segment)))
    packed, causal = draw(_packed), case.pattern.causal
    branch, documents = (Branch(), (segment,) * count) if packed else (Branch(segment), None)
    return replace(
        case, tokens=segment * count, order="dealt", cuts=None, pattern=Pattern((branch,), causal, documents),
        bucket=None if case.bucket is None else max(case.bucket, segment * count),
    )  # fmt: skip
