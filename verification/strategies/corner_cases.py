"""Cases that would hardly ever be drawn: each needs several things at a time, and is made of a drawn one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.shards import HANDS
from verification.case import Case
from verification.strategies.decoding import digits

Draw = st.DrawFn

MOST_TOKENS = 64  # of all but few Cases
_MOST_DEALT = 60  # for few ranks
_flags = st.booleans()
_quarters = st.integers(0, 3)
_eighths = st.integers(0, 7)
_sixteenths = st.integers(0, 15)
_twice = st.sampled_from((1, 1, 1, 2))
_many_heads = st.sampled_from(((4, 4), (5, 5), (8, 4), (8, 2), (9, 3), (6, 2)))


def _apart(draw: Draw, case: Case) -> Case:
    """On at least four ranks: ranks half the ring apart share long segments, neighbours at most short ones. So the
    messages of `direct` to one distance are longer than the bucket, and those before and after them fit into one. No
    documents, which would divide the long segments."""
    size = len(case.ranks)
    shard = max(8, case.tokens // size)
    branches = Branch(2 * shard), Branch(3 + draw(_quarters))
    return replace(
        case, tokens=size * shard, order="paired", cuts=None, pattern=Pattern(branches), exchange="direct",
        bucket=shard - draw(_quarters),
    )  # fmt: skip


def _two_in_a_round(draw: Draw, case: Case) -> Case:
    """On at least four ranks: messages of `direct` of which two fit into the bucket, and three do not."""
    size = len(case.ranks)
    shard = max(4, case.tokens // size)
    return replace(
        case, tokens=size * shard, order="contiguous", cuts=None, pattern=Pattern.dense(), exchange="direct",
        bucket=2 * shard + draw(_quarters),
    )  # fmt: skip


def _masked_by_position(draw: Draw, case: Case) -> Case:
    """On at least three ranks: keys of several of them in one call, in an order that only their positions tell."""
    branch = Branch(None if draw(_flags) else case.tokens, 1 + draw(_flags))
    return replace(
        case, order="hilbert" if draw(_flags) else "shuffled", cuts=None, exchange="direct", bucket=None,
        pattern=Pattern((branch,), causal=True),
    )  # fmt: skip


def shifted(draw: Draw, case: Case) -> Case:
    """Heads whose grids are shifted against each other, over ranges that lie anywhere. Most such Cases make calls that
    take listed rows along from head to head; hardly any other Case does. The grids run through the whole sequence, so
    there are no documents."""
    heads, dilation = 3 + draw(_quarters) % 3, 5 + draw(_flags)
    return replace(
        case, tokens=MOST_TOKENS - draw(_sixteenths), order="permuted", cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern((Branch(None, dilation, tuple(range(heads))),)),
        bucket=None if case.bucket is None else max(case.bucket, MOST_TOKENS // 8),
    )  # fmt: skip


def _many_documents(draw: Draw, case: Case) -> Case:
    """On two or three ranks, striped: many documents, of each of which every rank has a few rows that are no
    neighbours. So a message has more ranges of rows than are copied one by one."""
    heads, length, rate = 3, 7 + draw(_quarters), 5 - len(case.ranks)
    branch = Branch(None, rate, tuple(head % rate for head in range(heads)))
    documents = (*(length,) * (MOST_TOKENS // length), draw(_quarters))
    return replace(
        case, tokens=sum(documents), order="striped", cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern((branch,), case.pattern.causal, documents),
        bucket=None if case.bucket is None else max(case.bucket, MOST_TOKENS),
    )  # fmt: skip


def _uneven(draw: Draw, case: Case) -> Case:
    """Heads that have either of two offsets. Those of one are mostly no regular rectangle, and so are listed."""
    branch = case.pattern.branches[0]
    heads, kv_heads = draw(_many_heads)
    offsets = digits(draw(st.integers(0, 2**heads - 1)), 2, heads)
    branch = replace(branch, dilation_rate=max(branch.dilation_rate, 2), offset=offsets, heads=None)
    return replace(case, heads=heads, kv_heads=kv_heads, pattern=replace(case.pattern, branches=(branch,)))


def _uneven_slots(draw: Draw, case: Case) -> Case:
    """Striped, short segments in short documents: a rank's query rows of several segments lie at equal distances, the
    slots of the keys that it receives for them do not."""
    lengths = tuple(2 + length for length in digits(draw(st.integers(0, 5**12 - 1)), 5, 12))
    branch = Branch(4 + draw(_quarters), heads=None if draw(_flags) else range(case.heads))
    return replace(
        case, tokens=sum(lengths), order="striped", cuts=None,
        pattern=Pattern((branch,), case.pattern.causal, lengths),
        bucket=None if draw(_flags) else 12 + draw(_eighths), exchange="direct" if draw(_flags) else "ring",
    )  # fmt: skip


def _nearly_equal_segments(draw: Draw, case: Case) -> Case:
    """A branch for each head, all with as many rows in a segment at equal steps, some with segments shorter by a token:
    only the distances of their segments tell them apart."""
    heads, rate, rows, folds = 2 + draw(_quarters), 2 + draw(_quarters), 1 + draw(_quarters), 2 + draw(_flags)
    segment = rows * rate
    branches = tuple(Branch(segment - draw(_flags), rate, 0, range(head, head + 1)) for head in range(heads))
    size = max(1, min(len(case.ranks), MOST_TOKENS // (folds * segment)))
    return replace(
        case, tokens=size * folds * segment, cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern(branches, case.pattern.causal),
    )  # fmt: skip


def _narrow_beside_wide(draw: Draw, case: Case) -> Case:
    """On two to four ranks: rows of all heads that no other rank needs, beside rows of one head that travel, in
    messages longer than the bucket. What a buffer must hold beyond the bucket goes by the latter."""
    heads = 2 + draw(_flags)
    shard = heads * (4 + draw(_quarters))
    local = Branch(shard // (1 + draw(_flags)) if shard % 2 == 0 else shard)
    return replace(
        case, tokens=len(case.ranks) * shard, order="contiguous", cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern((local, Branch(None, heads, tuple(range(heads)))), case.pattern.causal),
        bucket=1 + draw(_flags), exchange="direct" if draw(_flags) else "ring",
    )  # fmt: skip


def _dealt(draw: Draw, case: Case) -> Case:
    """Positions dealt like cards: a rank has three hands, one after the other, and a segment, or a document, has one
    card of each, or two. So a rank's rows of one segment lie apart, with those of other segments between them: nothing
    else makes a whole shard one regular tile whose rows are in another order than the shard's."""
    hands = HANDS * len(case.ranks)
    segment = hands * draw(_twice)
    count = draw(st.integers(2, max(2, _MOST_DEALT // segment)))
    packed, causal = draw(_flags), case.pattern.causal
    branch, documents = (Branch(), (segment,) * count) if packed else (Branch(segment), None)
    return replace(
        case, tokens=segment * count, order="dealt", cuts=None, pattern=Pattern((branch,), causal, documents),
        bucket=None if case.bucket is None else max(case.bucket, segment * count),
    )  # fmt: skip


def _blind(draw: Draw, case: Case) -> Case:
    """No query sees any key, since the offset lies past the segments. Without this, some runs have no such Case."""
    segment = 1 + draw(_quarters)
    return replace(case, pattern=replace(case.pattern, branches=(Branch(segment, segment + 1, segment),)))


# By a number below 16: how many ranks it needs at least, and takes at most, and what is made.
RARE: dict[int, tuple[int, int, Callable[[Draw, Case], Case]]] = {
    4: (2, 4, _uneven_slots),
    5: (1, 1024, _nearly_equal_segments),
    6: (4, 8, _apart),
    7: (3, 8, _masked_by_position),
    8: (4, 8, _two_in_a_round),
    9: (2, 4, _narrow_beside_wide),
    10: (1, 1024, _dealt),
    11: (1, 1024, _dealt),
    12: (2, 3, _many_documents),
    13: (1, 1024, _uneven),
    14: (1, 1024, _uneven),
    15: (4, 8, _apart),
}


def rare(draw: Draw, case: Case) -> Case:
    """Now and then one of those that would hardly ever be drawn."""
    if draw(_eighths) == 7 and draw(_eighths) == 7:
        return _blind(draw, case)
    found = RARE.get(draw(_sixteenths))
    if found is None:
        return case
    fewest, most, make = found
    return make(draw, case) if fewest <= len(case.ranks) <= most else case
