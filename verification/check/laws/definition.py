"""The patterns that are published, said a second time.

Oracle and ranks take their patterns from `reference.pattern`: a mistake there is on both sides of every comparison.
Here the pairs are collected segment by segment from lists of tokens, as the papers describe them, without arithmetic
on positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import fields
from reference.pattern import Pattern, multiplicity
from ring.comm.transport import Transport
from verification.case import Case
from verification.check.laws import oracle_again
from verification.check.laws.law import How, Law
from verification.check.laws.refusals import not_refused
from verification.draw.documents import documents_of
from verification.failures import WrongResult
from verification.run.backends import Backend

Counts = NDArray[np.int64]
_MOST_TOKENS, _MOST_HEADS, _MOST_RATE = 24, 6, 7
MADE = ("longnet", "head_groups")
RULES = ("paper", "torchscale", "fkodom")


# --- what is published ------------------------------------------------------------------------------------------------


def _in_turn(rate: int, heads: int) -> list[int]:
    """LongNet, section 2.2: the heads of a branch take the offsets 0, 1, ..., r - 1 in turn."""
    return list(islice(cycle(range(rate)), heads))


def _in_stretches(rate: int, heads: int) -> list[int]:
    """torchscale: the first heads take offset 0, as many the next one, and so on; the last stretch may be short."""
    stretch = next(size for size in range(1, heads + 1) if size * rate >= heads)
    return [offset for offset in range(rate) for _ in range(stretch)][:heads]


def _of_branch(number: int, rate: int) -> int:
    """dilated-attention-pytorch: one offset a branch, which the branches take in turn."""
    return list(islice(cycle(range(rate)), number + 1))[-1]


Chosen = list[list[tuple[int | None, int] | None]]  # by branch and head: segment length and offset, or no such branch


def offsets_of(rule: str, number: int, rate: int, heads: int) -> list[int]:
    """Of the branch of that number, by head."""
    if rule == "fkodom":
        return [_of_branch(number, rate)] * heads
    return _in_turn(rate, heads) if rule == "paper" else _in_stretches(rate, heads)


def longnet(segments: list[int | None], rates: list[int], heads: int, rule: str) -> Chosen:
    """Every head has every branch."""
    chosen: Chosen = []
    for number, (segment, rate) in enumerate(zip(segments, rates, strict=True)):
        chosen.append([(segment, offset) for offset in offsets_of(rule, number, rate, heads)])
    return chosen


def head_groups(segments: list[int | None], rates: list[int], heads: int) -> list[list[tuple[int | None, int] | None]]:
    """The same where each head has one branch: the first branch takes the first heads. Groups are as equal as can be,
    and larger ones come first."""
    groups = np.array_split(range(heads), len(rates))
    chosen: list[list[tuple[int | None, int] | None]] = []
    for number, (group, rate) in enumerate(zip(groups, rates, strict=True)):
        mine = (segments[number], _of_branch(number, rate))
        chosen.append([mine if head in group else None for head in range(heads)])
    return chosen


def pairs(
    tokens: int,
    rates: list[int],
    chosen: Chosen,
    causal: bool,
    documents: tuple[int, ...] | None = None,
    windows: list[int | None] | None = None,
) -> Counts:
    """(heads, tokens, tokens): how many branches let a query see a key. Segments are cut anew in each document.
    windows: of each branch, as many tokens on either side of a query as it sees; None: it sees all.
    """
    heads = len(chosen[0])
    found = np.zeros((heads, tokens, tokens), np.int64)
    for rate, of_heads, window in zip(rates, chosen, windows or [None] * len(rates), strict=True):
        for head, one in enumerate(of_heads):
            if one is None:
                continue
            length, offset = one
            for segment in _segments(tokens, length, documents):
                kept = segment[offset::rate]  # from the offset on every r-th of the segment
                for query in kept:
                    for key in sorted({*kept} & {*_around(query, tokens, window)}):
                        found[head, query, key] += not causal or key <= query
    return found


def _around(query: int, tokens: int, window: int | None) -> list[int]:
    """The tokens from so many before the query to so many behind it."""
    before, behind = list(range(query)), list(range(query + 1, tokens))
    if window is None:
        return [*before, query, *behind]
    return [*before[::-1][:window], query, *behind[:window]]


def _segments(tokens: int, length: int | None, documents: tuple[int, ...] | None) -> Iterator[list[int]]:
    everything = iter(range(tokens))
    for size in (tokens,) if documents is None else documents:
        document = list(islice(everything, size))
        while document:
            yield document[:length]
            document = [] if length is None else document[length:]


# --- the law ----------------------------------------------------------------------------------------------------------


def _windows(tokens: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(0, 4), st.integers(0, tokens + 3))


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    made = draw(st.sampled_from(MADE))
    branches = draw(st.integers(1, 3))
    tokens = draw(st.integers(1, _MOST_TOKENS))
    heads = draw(st.integers(branches if made == "head_groups" else 1, _MOST_HEADS))
    lengths = st.one_of(st.integers(1, tokens + 3), st.integers(1, tokens + 3), st.none())
    how: How = {
        "made": made,
        "segment_lengths": draw(st.lists(lengths, min_size=branches, max_size=branches)),
        "dilation_rates": draw(st.lists(st.integers(1, 7), min_size=branches, max_size=branches)),
        "offsets": draw(st.sampled_from(RULES)),
        "windows": draw(st.lists(_windows(tokens), min_size=branches, max_size=branches)),
    }
    pattern = Pattern.dense(draw(st.booleans()), documents_of(draw, tokens, [tokens // 2]))
    case = Case(
        world=world, group=None, tokens=tokens, order="contiguous", cuts=None,
        pattern=pattern, batch=1, heads=heads, kv_heads=heads, head_dim=1, dtype="float32",
        scale=None, score_scale=1.0, values="normal", seed=0, exchange="ring", bucket=None, kernel="auto",
        lse="unused", strided=False,
    )  # fmt: skip
    return case, how


def check_definition(backend: Backend, case: Case, how: How) -> float:
    """Of what the ranks run, not of this process's own copy: rank 0 looks at it alone, without messages."""
    backend.submit(misread, case, how)
    for wrong in backend.collect():
        if wrong is not None:
            raise WrongResult(wrong)
    return 0.0


def misread(transport: Transport, case: Case, how: How) -> str | None:
    """Task: what is wrong, of rank 0; None for nothing."""
    if transport.rank:
        return None
    offsets = _other_offsets(case.heads) or _other_groups(case.heads)
    return not_refused() or offsets or _not_as_published(case, how) or _dense_apart(case, how) or _far_apart(case, how)


def _other_offsets(heads: int) -> str | None:
    """Of every rule, as many heads and each rate: rules differ for few of them."""
    for rule in RULES:
        for rate in range(1, _MOST_RATE + 1):
            made = Pattern.longnet([rate], [rate], heads, offsets=rule).branches[0].offsets(heads)
            if list(made) != offsets_of(rule, 0, rate, heads):
                return f"offsets {rule!r} of {heads} heads at rate {rate}: {made}, as published " + str(
                    offsets_of(rule, 0, rate, heads)
                )
    return None


def _other_groups(heads: int) -> str | None:
    """Of as many groups as there can be, at each rate: which heads each has, and their offset."""
    for count in range(1, heads + 1):
        for rate in range(1, _MOST_RATE + 1):
            rates = [rate] * count
            made = [one.offsets(heads) for one in Pattern.head_groups(rates, rates, heads).branches]
            groups = head_groups([*rates], rates, heads)
            published = [tuple(None if one is None else one[1] for one in chosen) for chosen in groups]
            if made != published:
                return f"{count} groups of {heads} heads at rate {rate}: offsets {made}, as published {published}"
    return None


def _not_as_published(case: Case, how: How) -> str | None:
    segments, rates, causal = how["segment_lengths"], how["dilation_rates"], case.pattern.causal
    packed = case.pattern.documents
    if how["made"] == "longnet":
        made = Pattern.longnet(segments, rates, case.heads, causal, how["offsets"], packed)
        chosen = longnet(segments, rates, case.heads, how["offsets"])
    else:
        made = Pattern.head_groups(segments, rates, case.heads, causal, packed)
        chosen = head_groups(segments, rates, case.heads)
    windows = _windows_of(how)
    limited = zip(made.branches, windows, strict=True)
    made = replace(made, branches=tuple(replace(branch, window=window) for branch, window in limited))
    each = zip(rates, chosen, windows, strict=True)
    by_branch = [pairs(case.tokens, [rate], [of], causal, packed, [window]) for rate, of, window in each]
    wanted = sum(by_branch[1:], start=by_branch[0])
    return _apart(how["made"], made, case, how, wanted) or oracle_again.looked_at(made, by_branch)


def _dense_apart(case: Case, how: How) -> str | None:
    """Of `Pattern.dense` with each window."""
    causal, packed = case.pattern.causal, case.pattern.documents
    for window in _windows_of(how):
        wanted = pairs(case.tokens, [1], [[(None, 0)] * case.heads], causal, packed, [window])
        made = Pattern.dense(causal, packed, window)
        if wrong := _apart("dense", made, case, how, wanted) or oracle_again.looked_at(made, [wanted]):
            return wrong
    return None


def _far_apart(case: Case, how: How) -> str | None:
    """Of as many tokens, without documents, from a position on that is 0 in 32 bits and begins a segment of every
    branch: they see each other as the first ones do, and of the first ones what is in no segment."""
    segments, rates, causal = how["segment_lengths"], how["dilation_rates"], case.pattern.causal
    made = Pattern.longnet(segments, rates, case.heads, causal, how["offsets"])
    begin = math.lcm(*(rate if length is None else length for length, rate in zip(segments, rates, strict=True))) << 32
    near = torch.arange(case.tokens)
    wanted = pairs(case.tokens, rates, longnet(segments, rates, case.heads, how["offsets"]), causal)
    found = multiplicity(made, near + begin, near + begin, case.heads).numpy()
    if not np.array_equal(found, wanted):
        return f"{made}: the {case.tokens} tokens from {begin} on do not see each other as those from 0 on do"
    if None not in segments and multiplicity(made, near + begin, near, case.heads).any():
        return f"{made}: of the {case.tokens} tokens from {begin} on, some see the first {case.tokens}"
    return None


def _apart(what: str, made: Pattern, case: Case, how: How, wanted: Counts) -> str | None:
    """Where a pattern is not as it is wanted."""
    positions = torch.arange(case.tokens)
    found = multiplicity(made, positions, positions, case.heads).numpy()
    apart = np.argwhere(found != wanted)
    if not len(apart):
        return None
    head, query, key = (int(i) for i in apart[0])
    return (
        f"{what}: head {head}, query {query}, key {key}: {found[head, query, key]} branches see the pair, as published "
        f"{wanted[head, query, key]}; of {case.tokens} tokens, {case.heads} heads, {how}, causal {made.causal}, "
        f"documents {made.documents}"
    )


def _windows_of(how: How) -> list[int | None]:
    """Of each branch; saved examples may be from before there were any."""
    return how.get("windows") or [None] * len(how["dilation_rates"])


def _premise(case: Case, how: Any) -> None:
    if isinstance(how, dict) and "windows" not in how:  # which is from before there were windows
        how = how | {"windows": None}
    fields.exactly("how", how, ["made", "segment_lengths", "dilation_rates", "offsets", "windows"])
    fields.choice("made of how", how["made"], MADE)
    fields.choice("offsets of how", how["offsets"], RULES)
    fields.at_most("tokens", case.tokens, _MOST_TOKENS)
    fields.at_most("heads", case.heads, _MOST_HEADS)
    lengths, rates = how["segment_lengths"], how["dilation_rates"]
    if not isinstance(lengths, list) or not isinstance(rates, list) or not 1 <= len(lengths) == len(rates) <= 3:
        raise ValueError(f"segment_lengths and dilation_rates of how are {lengths!r} and {rates!r}; they must be lists "
                         "of one to three entries, equally long")  # fmt: skip
    for name, values in (("segment_lengths", [x for x in lengths if x is not None]), ("dilation_rates", rates)):
        for value in values:
            fields.integer(f"an entry of {name} of how", value, 1, 1024)
    windows = _windows_of(how)
    if not isinstance(windows, list) or len(windows) != len(rates):
        raise ValueError(f"windows of how is {windows!r}; it must be a list of {len(rates)} entries")
    for window in (window for window in windows if window is not None):
        fields.integer("an entry of windows of how", window, 0, 1024)
    if how["made"] == "head_groups" and case.heads < len(rates):
        raise ValueError(f"heads is {case.heads}; it must be at least {len(rates)}, the number of groups")


PATTERNS_ARE_AS_PUBLISHED = Law("patterns are as published", _draw, check_definition, _premise, share=0.05, most=60)
