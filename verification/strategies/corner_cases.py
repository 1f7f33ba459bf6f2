"""Corner cases: each needs a combination of fields that is hardly ever drawn, and is made from a drawn Case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from reference.shards import HANDS
from reference.slices import Slice
from verification.case import Case
from verification.strategies.decoding import digits

Draw = st.DrawFn

MAX_TOKENS = 64  # of nearly all Cases
_MAX_DEALT = 60  # tokens of `_dealt` on few ranks
_flags = st.booleans()
_quarters = st.integers(0, 3)
_eighths = st.integers(0, 7)
_sixteenths = st.integers(0, 15)
_twice = st.sampled_from((1, 1, 1, 2))
_many_heads = st.sampled_from(((4, 4), (5, 5), (8, 4), (8, 2), (9, 3), (6, 2)))


def _apart(draw: Draw, case: Case) -> Case:
    """Use four ranks or more: ranks half the ring apart share long segments, neighbours at most short ones. So the
    messages of `direct` at one distance exceed the bucket, and those before and after it fit. There are no documents,
    which would divide the long segments."""
    size = len(case.ranks)
    shard = max(8, case.tokens // size)
    branches = Branch(2 * shard), Branch(3 + draw(_quarters))
    return replace(
        case, tokens=size * shard, order="paired", cuts=None, pattern=Pattern(branches), exchange="direct",
        bucket=shard - draw(_quarters),
    )  # fmt: skip


def _two_in_a_round(draw: Draw, case: Case) -> Case:
    """Use four ranks or more, and messages of `direct` of which two fit into the bucket, and three do not."""
    size = len(case.ranks)
    shard = max(4, case.tokens // size)
    return replace(
        case, tokens=size * shard, order="contiguous", cuts=None, pattern=Pattern.dense(), exchange="direct",
        bucket=2 * shard + draw(_quarters),
    )  # fmt: skip


def _masked_by_position(draw: Draw, case: Case) -> Case:
    """Use three ranks or more, one call with keys of several ranks, and an order known only by its positions."""
    branch = Branch(None if draw(_flags) else case.tokens, 1 + draw(_flags))
    return replace(
        case, order="hilbert" if draw(_flags) else "shuffled", cuts=None, exchange="direct", bucket=None,
        pattern=Pattern((branch,), causal=True),
    )  # fmt: skip


def shifted(draw: Draw, case: Case) -> Case:
    """Shift the grids of the heads against each other, over permuted ranges. Most such Cases make calls whose listed
    rows move from head to head; few other Cases do. The grids span the whole sequence, so there are no documents."""
    heads, dilation = 3 + draw(_quarters) % 3, 5 + draw(_flags)
    return replace(
        case, tokens=MAX_TOKENS - draw(_sixteenths), order="permuted", cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern((Branch(None, dilation, tuple(range(heads))),)),
        bucket=None if case.bucket is None else max(case.bucket, MAX_TOKENS // 8),
    )  # fmt: skip


def _many_documents(draw: Draw, case: Case) -> Case:
    """Use two or three ranks in striped order, and many documents: every rank has a few rows of each document that are
    not adjacent. So a message has more ranges of rows than are copied one by one."""
    heads, length, rate = 3, 7 + draw(_quarters), 5 - len(case.ranks)
    branch = Branch(None, rate, tuple(head % rate for head in range(heads)))
    documents = (*(length,) * (MAX_TOKENS // length), draw(_quarters))
    return replace(
        case, tokens=sum(documents), order="striped", cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern((branch,), case.pattern.causal, documents),
        bucket=None if case.bucket is None else max(case.bucket, MAX_TOKENS),
    )  # fmt: skip


def _uneven(draw: Draw, case: Case) -> Case:
    """Give each head one of two offsets. Heads of equal offset are rarely evenly spaced, so they are mostly listed."""
    branch = case.pattern.branches[0]
    heads, kv_heads = draw(_many_heads)
    offsets = digits(draw(st.integers(0, 2**heads - 1)), 2, heads)
    branch = replace(branch, dilation_rate=max(branch.dilation_rate, 2), offset=offsets, heads=None)
    return replace(case, heads=heads, kv_heads=kv_heads, pattern=replace(case.pattern, branches=(branch,)))


def _uneven_slots(draw: Draw, case: Case) -> Case:
    """Use short segments in short documents, in striped order: a rank's query rows of several segments have equal
    steps, but the slots of the received keys do not."""
    lengths = tuple(2 + length for length in digits(draw(st.integers(0, 5**12 - 1)), 5, 12))
    branch = Branch(4 + draw(_quarters), heads=None if draw(_flags) else range(case.heads))
    return replace(
        case, tokens=sum(lengths), order="striped", cuts=None,
        pattern=Pattern((branch,), case.pattern.causal, lengths),
        bucket=None if draw(_flags) else 12 + draw(_eighths), exchange="direct" if draw(_flags) else "ring",
    )  # fmt: skip


def _nearly_equal_segments(draw: Draw, case: Case) -> Case:
    """Give each head a branch with as many rows in a segment, some with segments shorter by a token: the branches
    differ only in the distance of their segments."""
    heads, rate, rows, folds = 2 + draw(_quarters), 2 + draw(_quarters), 1 + draw(_quarters), 2 + draw(_flags)
    segment = rows * rate
    branches = tuple(Branch(segment - draw(_flags), rate, 0, range(head, head + 1)) for head in range(heads))
    size = max(1, min(len(case.ranks), MAX_TOKENS // (folds * segment)))
    return replace(
        case, tokens=size * folds * segment, cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern(branches, case.pattern.causal),
    )  # fmt: skip


def _narrow_beside_wide(draw: Draw, case: Case) -> Case:
    """Use two to four ranks: local rows have all heads, sent rows have one head, and messages exceed the bucket. The
    space of a buffer beyond the bucket depends on the sent rows."""
    heads = 2 + draw(_flags)
    shard = heads * (4 + draw(_quarters))
    local = Branch(shard // (1 + draw(_flags)) if shard % 2 == 0 else shard)
    return replace(
        case, tokens=len(case.ranks) * shard, order="contiguous", cuts=None, heads=heads, kv_heads=heads,
        pattern=Pattern((local, Branch(None, heads, tuple(range(heads)))), case.pattern.causal),
        bucket=1 + draw(_flags), exchange="direct" if draw(_flags) else "ring",
    )  # fmt: skip


def _dealt(draw: Draw, case: Case) -> Case:
    """Give each rank three interleaved stripes, and each segment or document one position of each stripe, or two. So a
    segment's rows are not adjacent in the shard: no other Case makes a whole shard one regular tile whose rows are in
    another order than the shard's."""
    stripes = HANDS * len(case.ranks)
    segment = stripes * draw(_twice)
    count = draw(st.integers(2, max(2, _MAX_DEALT // segment)))
    packed, causal = draw(_flags), case.pattern.causal
    branch, documents = (Branch(), (segment,) * count) if packed else (Branch(segment), None)
    return replace(
        case, tokens=segment * count, order="dealt", cuts=None, pattern=Pattern((branch,), causal, documents),
        bucket=None if case.bucket is None else max(case.bucket, segment * count),
    )  # fmt: skip


def _two_bounds(draw: Draw, case: Case) -> Case:
    """Use earlier keys with one bound and later keys with another, of which every query sees some, in an order known
    only by its positions: the tiles of a query differ in nothing but their bounds."""
    bound, tokens = draw(_quarters), 16 + draw(_sixteenths)
    end = bound + 2 + draw(_quarters)
    slices = Slice(k1=end, high=bound), Slice(k0=end, high=end + draw(_quarters))
    return replace(
        case, tokens=tokens, order="hilbert" if draw(_flags) else "shuffled", cuts=None,
        pattern=Pattern((Branch(slices=slices),)), bucket=None if draw(_flags) else tokens,
    )  # fmt: skip


def _blind(draw: Draw, case: Case) -> Case:
    """Hide all keys from all queries: the offset lies past the segments. Without this, some runs have no such Case."""
    segment = 1 + draw(_quarters)
    return replace(case, pattern=replace(case.pattern, branches=(Branch(segment, segment + 1, segment),)))


# By a number below 16: fewest ranks, most ranks, and the function that makes the Case.
RARE: dict[int, tuple[int, int, Callable[[Draw, Case], Case]]] = {
    3: (1, 1024, _two_bounds),
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
    """Turn a third to two thirds of the Cases, by their number of ranks, into corner cases."""
    if draw(_eighths) == 7 and draw(_eighths) == 7:
        return _blind(draw, case)
    corner = RARE.get(draw(_sixteenths))
    if corner is None:
        return case
    fewest, most, make = corner
    return make(draw, case) if fewest <= len(case.ranks) <= most else case
