"""Layouts that balance the work of a packed batch: each token once, work as the oracle counts it, a small maximum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.cost import Setting, flops, sent
from reference.documents import documents_from_cu_seqlens
from reference.pattern import Branch, Pattern, multiplicity
from ring.balance import CHUNK, ENOUGH, ENOUGH_TOKENS, _by_arcs, work
from ring.layout import Layout
from tests.support.drawn_patterns import slices
from tests.support.plan_settings import documents, patterns


@given(st.data(), st.integers(1, 3), st.integers(0, 40))
@settings(max_examples=150)
def test_work_is_what_the_oracle_counts(data: st.DataObject, heads: int, n: int) -> None:
    drawn = data.draw(patterns(heads))
    branches = tuple(replace(one, slices=data.draw(st.none() | slices(n))) for one in drawn.branches)
    pattern = Pattern(branches, drawn.causal, data.draw(documents(n)))
    everywhere = torch.arange(n)
    seen = multiplicity(pattern, everywhere, everywhere, heads).sum((0, 2)).numpy()
    assert np.array_equal(seen, work(pattern, n, heads))


def test_heads_that_the_pattern_names_need_not_be_given() -> None:
    for pattern in (Pattern.longnet((4, 8), (1, 2), 6), Pattern.head_groups((4, 8), (1, 2), 6)):
        assert np.array_equal(work(pattern, 24), work(pattern, 24, 6))


@given(st.data(), st.integers(0, 300), st.integers(1, 5))
@settings(max_examples=100)
def test_each_token_has_one_rank(data: st.DataObject, n: int, p: int) -> None:
    lengths = data.draw(documents(n)) or (n,)
    for layout in (
        Layout.zigzag(n, p, documents=lengths),
        Layout.balanced(Pattern.dense(data.draw(st.booleans()), lengths), n, p),
    ):
        held = [layout.positions(rank).tolist() for rank in range(p)]
        assert sorted(itertools.chain(*held)) == list(range(n))
        assert all(mine == sorted(mine) for mine in held)


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 5))
@example([8, 7, 9], 4)
@settings(max_examples=100)
def test_zigzag_divides_long_documents_alone(lengths: list[int], p: int) -> None:
    layout, begin = Layout.zigzag(sum(lengths), p, documents=tuple(lengths)), 0
    held = [set(layout.positions(rank).tolist()) for rank in range(p)]
    for length in lengths:
        mine = [sorted(one & set(range(begin, begin + length))) for one in held]
        if length >= 2 * p:
            edges = [begin + chunk * length // (2 * p) for chunk in range(2 * p + 1)]
            chunks = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
            assert mine == [chunks[rank] + chunks[2 * p - 1 - rank] for rank in range(p)]
        else:
            assert sum(map(bool, mine)) == min(length, 1)
        begin += length


@given(st.integers(2, 8), st.data())
@settings(max_examples=100)
def test_short_documents_give_ranks_equal_tokens(p: int, data: st.DataObject) -> None:
    """The last that a rank gets, it gets when it has no more tokens than the mean of those that are dealt by then."""
    lengths = data.draw(st.lists(st.integers(0, 2 * p - 1), min_size=1, max_size=60))
    layout = Layout.zigzag(sum(lengths), p, documents=tuple(lengths))
    assert max(layout.counts) <= sum(lengths) / p + max(lengths)
    assert layout == Layout.zigzag(sum(lengths), p, documents=tuple(lengths))


@given(st.integers(2, 8), st.data())
@settings(max_examples=60)
def test_ranks_alternate_short_documents(p: int, data: st.DataObject) -> None:
    """Ranks have the same lengths, and equal work, if each length occurs once for each rank, in any order."""
    one = data.draw(st.lists(st.integers(1, 2 * p - 1), min_size=1, max_size=8))
    lengths = tuple(data.draw(st.permutations(one * p)))
    layout = Layout.zigzag(sum(lengths), p, documents=lengths)
    assert set(layout.counts) == {sum(one)}
    assert unevenness(layout, Pattern.dense(True, lengths)) == 1.0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_many_short_documents_are_even(p: int) -> None:
    generator = np.random.default_rng(p)
    lengths = tuple(generator.integers(1, 2 * p, 400).tolist())
    layout = Layout.zigzag(sum(lengths), p, documents=lengths)
    assert max(layout.counts) * p <= sum(lengths) + p
    assert unevenness(layout, Pattern.dense(True, lengths)) <= ENOUGH


def unevenness(layout: Layout, pattern: Pattern) -> float:
    """Work of the most loaded rank, as a multiple of the mean."""
    cost, p = work(pattern, layout.n), layout.world_size
    return max(int(cost[layout.positions(rank)].sum()) for rank in range(p)) * p / int(cost.sum())


@st.composite
def packed(draw: Any) -> tuple[Pattern, int]:
    """A few chunks, of documents of any length."""
    n = draw(st.integers(2, 8)) * CHUNK - draw(st.integers(0, 63))
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    lengths = documents_from_cu_seqlens([0, *edges, n], n)
    branches = draw(st.sampled_from(((Branch(),), (Branch(128), Branch(None, 4)), (Branch(100, 2, 1),))))
    return Pattern(branches, draw(st.booleans()), lengths), n


@given(packed(), st.integers(2, 3))
@settings(max_examples=150)
def test_work_is_even_where_it_can_be(drawn: tuple[Pattern, int], p: int) -> None:
    pattern, n = drawn
    cost = work(pattern, n)
    if not cost.any():
        return
    chunks = np.add.reduceat(cost, np.arange(0, n, CHUNK))
    divisions = itertools.product(range(p), repeat=len(chunks))
    least = min(np.bincount(owners, weights=chunks, minlength=p).max() for owners in divisions)
    reached = float(least) * p / int(cost.sum()) + 1e-12
    assert unevenness(Layout.balanced(pattern, n, p), pattern) <= max(ENOUGH, reached)


def lengths_of(n: int, *found: int) -> tuple[int, ...]:
    """These documents, then ones of drawn lengths up to n tokens."""
    generator = np.random.default_rng(1)
    while left := n - sum(found):
        found += (min(left, 1 + int(generator.lognormal(4.0, 1.0))),)
    return found


@pytest.mark.parametrize("first", [(), (1 << 15,)], ids=["short", "one long"])
@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_packed_batches_are_balanced(first: tuple[int, ...], p: int) -> None:
    n = 1 << 16
    lengths = lengths_of(n, *first)
    for pattern in (Pattern.dense(True, lengths), Pattern.longnet((256, 1024), (1, 4), 8, True, documents=lengths)):
        layout = Layout.balanced(pattern, n, p)
        assert unevenness(layout, pattern) <= ENOUGH
        assert max(layout.counts) <= (ENOUGH_TOKENS if p < 64 else 1.4) * n / p, "memory goes by tokens"
        assert layout == Layout.balanced(pattern, n, p)


KI = 1024
FOUR_OF_FOUR = [None, *itertools.chain(*([0, *[1 + 5 * node] * 4] for node in range(4)))]
MASKS: dict[str, tuple[Callable[[], Pattern], int]] = {
    "images": (lambda: Pattern.spans([(begin, begin + 256) for begin in range(300, 64 * KI, 1637)]), 64 * KI),
    "answers": (lambda: Pattern.tree([None, *[0] * 16], [4 * KI, *[2 * KI] * 16]), 36 * KI),
    "a tree": (lambda: Pattern.tree(FOUR_OF_FOUR, [4 * KI, *[2 * KI, *[KI] * 4] * 4]), 28 * KI),
    "video": (lambda: Pattern.frames([1560] * 60), 93600),
    "first tokens": (lambda: Pattern.first_tokens(128, 4095), 64 * KI),
    "a prefix": (lambda: Pattern.prefix(16 * KI), 64 * KI),
}  # fmt: skip


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_balanced_in_few_runs(mask: str, p: int) -> None:
    make, n = MASKS[mask]
    layout = Layout.balanced(make(), n, p)
    assert unevenness(layout, make()) <= ENOUGH
    assert max(layout.counts) <= ENOUGH_TOKENS * n / p
    assert layout.runs is not None and len(layout.runs) <= 2 * p - 1


@given(st.integers(2, 6), st.lists(st.integers(0, 9), min_size=1, max_size=80))
@settings(max_examples=100)
def test_arcs_have_equal_tokens_and_work(p: int, cost: list[int]) -> None:
    """Whatever the work of a token: to within a few tokens, in two runs for each rank but one."""
    owner = _by_arcs(np.array(cost), p)
    tokens, loads = np.bincount(owner, minlength=p), np.bincount(owner, weights=cost, minlength=p)
    assert max(tokens) - min(tokens) <= 1
    assert max(loads) - sum(cost) / p <= 3 * max(cost)
    assert np.count_nonzero(np.diff(owner)) < 2 * p - 1


def test_work_beyond_63_bits_is_balanced() -> None:
    layout = Layout.balanced(Pattern.dense(causal=True), 2**20, 2**12, heads=2**12)
    assert max(layout.counts) <= 1.2 * 2**8 and sum(layout.counts) == 2**20


def test_short_documents_stay_whole() -> None:
    """So that they send nothing. Some have more than a rank's share and are divided, head and tail."""
    lengths, p = lengths_of(1 << 14, 1 << 13), 4
    layout, ends = Layout.balanced(Pattern.dense(True, lengths), 1 << 14, p), np.cumsum(lengths)
    for rank in range(p):
        held = set(layout.positions(rank).tolist())
        shares = [len(held & set(range(end - length, end))) for end, length in zip(ends, lengths, strict=True)]
        assert shares[0] == lengths[0] // p
        assert all(share in (0, length) for share, length in zip(shares[1:], lengths[1:], strict=True))


def test_one_sequence_is_contiguous_or_zigzag() -> None:
    causal, zigzag = Layout.balanced(Pattern.dense(True), 1 << 12, 4), Layout.zigzag(1 << 12, 4)
    assert causal == zigzag == Layout.zigzag(1 << 12, 4, documents=(1 << 12,))
    assert Layout.balanced(Pattern.longnet((64,), (1,), 4, True), 1 << 12, 4) == Layout.contiguous(1 << 12, 4)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=12), st.sampled_from(((2, 4), (2, 8), (3, 6))))
@settings(max_examples=40, deadline=None)
def test_only_documents_beyond_a_host_cross_hosts(lengths: list[int], place: tuple[int, int]) -> None:
    hosts, p = place
    pattern = Pattern((Branch(),), True, tuple(lengths))
    layout = Layout.balanced(pattern, sum(lengths), p, hosts=hosts)
    assert sorted(itertools.chain(*(layout.positions(rank).tolist() for rank in range(p)))) == [*range(sum(lengths))]
    by_host = Layout.balanced(pattern, sum(lengths), hosts)
    ranks = p // hosts
    for host in range(hosts):
        own = [layout.positions(rank).numpy() for rank in range(host * ranks, (host + 1) * ranks)]
        assert np.array_equal(np.sort(np.concatenate(own)), np.sort(by_host.positions(host).numpy()))


def test_hosts_keep_whole_documents() -> None:
    lengths = (500, 500, *(100,) * 8)  # contiguous halves would have unequal work
    pattern = Pattern((Branch(),), True, lengths)
    leaving = []
    for hosts in (1, 2):
        layout = Layout.balanced(pattern, sum(lengths), 8, hosts=hosts)
        setting = Setting(pattern, [layout.positions(rank).numpy() for rank in range(8)], 1, 1, 1, 1)
        matrix = sent(setting, "direct").forward
        leaving.append(int(matrix[:4, 4:].sum() + matrix[4:, :4].sum()))
        assert flops(setting).imbalance <= ENOUGH**hosts
    assert leaving[0] > 0 and leaving[1] == 0


@pytest.mark.parametrize("hosts", (0, 3, 2.0, True, "2"))
def test_hosts_that_do_not_divide_the_ranks_are_refused(hosts: Any) -> None:
    with pytest.raises(ValueError, match="hosts must be a number that divides the 4 ranks, got"):
        Layout.balanced(Pattern.dense(), 16, 4, hosts=hosts)
