"""The published patterns, stated a second time: from lists of tokens, as the papers have them, by no arithmetic."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from math import lcm

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import fast_oracle
from reference.pattern import Pattern, multiplicity
from tests.support.drawn_patterns import documents

RULES = ("paper", "torchscale", "fkodom")
Seen = list[list[tuple[int | None, int] | None]]  # by branch and head: segment length and offset, or no such branch


def offsets_of(rule: str, number: int, rate: int, heads: int) -> list[int]:
    """The offset of each head in the branch of that number."""
    if rule == "paper":  # LongNet, section 2.2: heads take 0, 1, ..., r - 1 in turn
        return list(islice(cycle(range(rate)), heads))
    if rule == "torchscale":  # the first heads take offset 0, as many take 1, and so on; the last stretch may be short
        stretch = next(size for size in range(1, heads + 1) if size * rate >= heads)
        return [offset for offset in range(rate) for _ in range(stretch)][:heads]
    return [list(islice(cycle(range(rate)), number + 1))[-1]] * heads  # branches take one offset each, in turn


def longnet(segments: list[int | None], rates: list[int], heads: int, rule: str) -> Seen:
    pairs = enumerate(zip(segments, rates, strict=True))
    return [[(length, offset) for offset in offsets_of(rule, i, rate, heads)] for i, (length, rate) in pairs]


def head_groups(segments: list[int | None], rates: list[int], heads: int) -> Seen:
    """The first branch takes the first heads; groups are as equal as can be, larger ones first."""
    groups = [set(group.tolist()) for group in np.array_split(range(heads), len(rates))]
    every = longnet(segments, rates, heads, "fkodom")
    return [[one if h in groups[i] else None for h, one in enumerate(of_heads)] for i, of_heads in enumerate(every)]


def segments_of(tokens: int, length: int | None, lengths: tuple[int, ...] | None) -> Iterator[list[int]]:
    everything = iter(range(tokens))
    for size in (tokens,) if lengths is None else lengths:
        document = list(islice(everything, size))
        while document:
            yield document[:length]
            document = [] if length is None else document[length:]


def around(query: int, tokens: int, window: int | None) -> set[int]:
    before, behind = list(range(query))[::-1], list(range(query + 1, tokens))
    return {*before[:window], query, *behind[:window]}


def pairs(pattern: Pattern, seen: Seen, tokens: int) -> np.ndarray:
    """(heads, tokens, tokens): how many branches let a query see a key."""
    found = np.zeros((len(seen[0]), tokens, tokens), np.int64)
    for branch, of_heads in zip(pattern.branches, seen, strict=True):
        for head, one in enumerate(of_heads):
            for segment in segments_of(tokens, one[0], pattern.documents) if one else ():
                kept = segment[one[1] :: branch.dilation_rate] if one else []
                for query in kept:
                    for key in around(query, tokens, branch.window).intersection(kept):
                        found[head, query, key] += not pattern.causal or key <= query
    return found


@pytest.mark.parametrize("heads", range(1, 8))
def test_offsets_follow_the_rules_in_equal_groups(heads: int) -> None:
    for rate in range(1, 8):
        for rule in RULES:
            made = Pattern.longnet([rate] * 4, [rate] * 4, heads, offsets=rule).branches
            assert [list(one.offsets(heads)) for one in made] == [offsets_of(rule, i, rate, heads) for i in range(4)]
        for count in range(1, heads + 1):
            served = [one.offsets(heads) for one in Pattern.head_groups([9] * count, [rate] * count, heads).branches]
            wanted = head_groups([9] * count, [rate] * count, heads)
            assert served == [tuple(one and one[1] for one in of_heads) for of_heads in wanted]


@st.composite
def published(draw: st.DrawFn) -> tuple[Pattern, Seen, int]:
    """A pattern, what its heads see, and how many tokens."""
    lengths = draw(st.none() | documents(5))
    tokens, parts = draw(st.integers(1, 20)) if lengths is None else sum(lengths), draw(st.integers(1, 3))
    segments = draw(st.lists(st.none() | st.integers(1, tokens + 3), min_size=parts, max_size=parts))
    rates = draw(st.lists(st.integers(1, 7), min_size=parts, max_size=parts))
    windows = draw(st.lists(st.none() | st.integers(0, 5) | st.just(2**70), min_size=parts, max_size=parts))
    heads, causal, rule = draw(st.integers(parts, 6)), draw(st.booleans()), draw(st.sampled_from((*RULES, "groups")))
    if rule == "groups":
        made, seen = Pattern.head_groups(segments, rates, heads, causal, lengths), head_groups(segments, rates, heads)
    else:
        made = Pattern.longnet(segments, rates, heads, causal, rule, lengths)
        seen = longnet(segments, rates, heads, rule)
    each = zip(made.branches, windows, strict=True)
    return replace(made, branches=tuple(replace(branch, window=window) for branch, window in each)), seen, tokens


@given(published())
def test_oracle_and_twin_see_published_pairs(drawn: tuple[Pattern, Seen, int]) -> None:
    pattern, seen, tokens = drawn
    heads, at, wanted = len(seen[0]), torch.arange(tokens), pairs(pattern, seen, tokens)
    assert np.array_equal(multiplicity(pattern, at, at, heads).numpy(), wanted)
    assert np.array_equal(fast_oracle.multiplicity(pattern, heads, tokens), wanted)
    if pattern.documents is None:  # tokens 2**32 segments on see each other as the first do
        far = at + (lcm(*(branch.segment_length or branch.dilation_rate for branch in pattern.branches)) << 32)
        assert np.array_equal(multiplicity(pattern, far, far, heads).numpy(), wanted)
        endless = any(one.segment_length is None and one.window in (None, 2**70) for one in pattern.branches)
        assert endless or not multiplicity(pattern, far, at, heads).any()


def test_the_published_setting_of_longnet() -> None:
    pattern = Pattern.longnet((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), heads=12)
    assert 16384 % 6 and 32768 % 12, "the rate does not divide the segment in two branches"
    assert pattern.branches[3].offset == (0, 1, 2, 3, 4, 5) * 2 and pattern.branches[4].offset == tuple(range(12))
    # The second segment of 16384 begins anew, whatever the first left over. By branch, head 2 selects of its tokens
    # 0 to 11: all; 0, 2, 4, ...; 2, 6, 10; 2, 8; and 10 of the segment that began 16384 = 4 mod 12 tokens before.
    points = torch.arange(16384, 16384 + 12)
    assert multiplicity(pattern, points, points, 12)[2].diagonal().tolist() == [2, 1, 4, 1, 2, 1, 3, 1, 3, 1, 4, 1]
