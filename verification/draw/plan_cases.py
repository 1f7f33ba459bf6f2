"""Hypothesis strategies that draw Cases whose plans are looked at, not what is computed. They shrink as others do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from verification.case import ORDERS, Case
from verification.draw.cases import HEADS, Draw, cuts_of, pattern_of
from verification.draw.decoding import digits, head_range
from verification.draw.documents import packed, windowed
from verification.draw.rare_cases import MOST_TOKENS

MOST_SHORT = 48  # tokens of a plan that is followed pair by pair
LEAST_FOLDED = 6  # segments: with fewer, all of them are within any limit of a call

_heads = st.sampled_from(HEADS)
_orders = st.sampled_from(ORDERS)
# Those in which a rank's ranges lie within each other, or later ones before earlier ones, come more often.
_irregular_orders = st.sampled_from((*ORDERS, "spliced", "permuted", "stepped"))
_within_each_other = st.sampled_from(("spliced", "spliced", "permuted", "shuffled"))
_of_several_ranges = st.sampled_from(("zigzag", "zigzag", "spliced", "permuted"))
# By "spliced" a rank holds most of a segment, and others one or two tokens of it.
_folded_orders = st.sampled_from(("striped", "zigzag", "spliced", "spliced", "spliced"))
_exchanges = st.sampled_from(("ring", "direct", "gather"))
_flags = st.booleans()
_quarters = st.integers(0, 3)
_seeds = st.integers(0, 255)
_numbers = st.integers(0, 2**24 - 1)  # of more bits Hypothesis mostly draws small ones
# Query heads of one offset that are no regular rectangle need several key/value heads with several query heads each.
_uneven_heads = st.sampled_from(((1, 1), (2, 1), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3)))
_rates = st.sampled_from((1, 2, 3, 2, 4, 5))
# Those of either offset may stand otherwise in each of several groups, or read some of several key/value heads.
_halved_heads = st.sampled_from(((4, 4), (6, 2), (8, 2), (9, 3), (5, 5), (8, 4)))
_halved_rates = st.sampled_from((2, 2, 3))


@st.composite
def plan_cases(draw: Draw, world: int) -> Case:
    """Cases whose plans are looked at, not what is computed: longer sequences, of many segments, in calls from a few
    tokens to several shards.
    """
    tokens = max(draw(st.integers(1, 4 * MOST_TOKENS)), draw(st.integers(1, MOST_TOKENS)))
    heads, kv_heads = draw(_heads)
    case = Case(
        world=world, group=None, tokens=tokens, order=draw(_orders), cuts=cuts_of(draw, tokens, world),
        pattern=pattern_of(draw, tokens, heads), batch=1, heads=heads, kv_heads=kv_heads, head_dim=1, dtype="float32",
        scale=None, score_scale=1.0, values="normal", seed=draw(_seeds), exchange=draw(_exchanges),
        bucket=draw(st.integers(1 + tokens // 32, 2 * tokens)), kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    case = _folded(draw, case) if draw(_quarters) else _packed(draw, case)
    return _windowed(draw, case)


def _windowed(draw: Draw, case: Case, often: bool = False) -> Case:
    return replace(case, pattern=windowed(draw, case.pattern, case.tokens, case.world, often))


def _packed(draw: Draw, case: Case) -> Case:
    return replace(case, pattern=replace(case.pattern, documents=packed(draw, case)))


def _folded(draw: Draw, case: Case) -> Case:
    """Many segments of one shape, of each of which a rank has as many tokens: folds of the keys of several ranks,
    which by `gather` are all there at once. In place of segments there may be documents of one length.
    """
    segment = case.world * (1 + draw(_quarters)) * (1 + draw(_flags))
    count = max(-(-case.tokens // segment), LEAST_FOLDED * (1 + draw(_quarters)))
    rate, causal = 1 + draw(_flags), draw(_quarters) == 3
    pattern = Pattern((Branch(segment, rate),), causal)
    if draw(_flags):
        pattern = Pattern((Branch(None, rate),), causal, (segment,) * count)
    return replace(
        case, tokens=segment * count, order=draw(_folded_orders), cuts=None, pattern=pattern,
        exchange="gather" if draw(_flags) else case.exchange,
    )  # fmt: skip


@st.composite
def irregular_cases(draw: Draw, world: int) -> Case:
    """Short sequences with all that is irregular at once: offsets drawn for each head, segments that divide nothing,
    windows of any length, documents and shards cut anywhere. What is folded, joined or listed then differs from call to
    call.
    """
    tokens = draw(st.integers(1, MOST_SHORT))
    halved = draw(_flags)
    heads, kv_heads = draw(_halved_heads if halved else _uneven_heads)
    made = _halved_branch if halved else _irregular_branch
    branches = [made(draw, tokens, heads) for _ in range(draw(st.integers(1, 3)))]
    case = Case(
        world=world, group=None, tokens=tokens, order=draw(_irregular_orders), cuts=cuts_of(draw, tokens, world),
        pattern=Pattern(tuple(branches), draw(_flags)), batch=1, heads=heads, kv_heads=kv_heads, head_dim=1,
        dtype="float32", scale=None, score_scale=1.0, values="normal", seed=draw(_seeds), exchange="ring",
        bucket=draw(st.integers(1, 2 * MOST_SHORT)), kernel="math", lse="unused", strided=False,
    )  # fmt: skip
    kind = draw(_quarters)
    if kind == 2:
        return _reaching(draw, case)
    return _windowed(draw, _one_segment(draw, case) if kind == 3 else _packed(draw, case), often=True)


def _reaching(draw: Draw, case: Case) -> Case:
    """Windows that reach over what other ranks have between two ranges of a rank, in an order in which a rank has
    several ranges. No segments and no documents, which would end there.
    """
    number = draw(_numbers)
    windows = [1 + number // 7**at % case.tokens for at in range(len(case.pattern.branches))]
    pairs = zip(case.pattern.branches, windows, strict=True)
    branches = tuple(replace(branch, segment_length=None, window=window) for branch, window in pairs)
    return replace(case, order=draw(_of_several_ranges), cuts=None, pattern=replace(case.pattern, branches=branches))


def _one_segment(draw: Draw, case: Case) -> Case:
    """Causal, in an order in which a rank has ranges before and behind those of others, cut anywhere: of two ranges of
    a rank either may be the one that sees more of another rank's.
    """
    branches = tuple(replace(branch, segment_length=None) for branch in case.pattern.branches)
    cuts = (0, *sorted(draw(st.integers(0, case.tokens)) for _ in range(case.world - 1)), case.tokens)
    return replace(case, order=draw(_within_each_other), cuts=cuts, pattern=Pattern(branches, True))


def _irregular_branch(draw: Draw, tokens: int, heads: int) -> Branch:
    served = head_range(draw(st.integers(0, heads * (heads + 1) // 2)), heads) if draw(_quarters) == 3 else None
    count, rate = heads if served is None else len(served), draw(_rates)
    length = draw(st.integers(0, tokens if draw(_flags) else 8)) or None
    offset = digits(draw(st.integers(0, rate**count - 1)), rate, count)
    return Branch(length, rate, offset if rate > 1 else 0, served)


def _halved_branch(draw: Draw, tokens: int, heads: int) -> Branch:
    """For heads that have either of two offsets, in segments that are mostly long: a rank receives many rows of some of
    the heads.
    """
    length = draw(st.integers(0, tokens)) if draw(_quarters) == 3 else 0
    return Branch(length or None, draw(_halved_rates), digits(draw(st.integers(0, 2**heads - 1)), 2, heads))
