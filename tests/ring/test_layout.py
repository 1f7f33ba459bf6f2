"""Layouts: an order of the positions and cuts into it; every position in exactly one place, however it is made."""

from __future__ import annotations

import re
import time
import tracemalloc
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ring.layout import Layout, Run
from tests.support.orders import orders_and_cuts

NAMED: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "hilbert": Layout.hilbert,
}


def shards(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world_size)]


def listed_copy(layout: Layout) -> Layout:
    """The same order, held as a listing even where it is a few runs."""
    order = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return Layout(layout.n, layout.cuts, None, order.numpy())


def runs_to_positions(runs: list[Run]) -> list[int]:
    return [run.start + i * run.step for run in runs for i in range(run.length)]


@pytest.mark.parametrize("name", NAMED)
@given(n=st.integers(0, 80), p=st.integers(1, 20))
@example(n=0, p=3)
@example(n=1, p=8)
@example(n=16, p=16)
def test_named_orders_hold_every_position_once(name: str, n: int, p: int) -> None:
    layout = NAMED[name](n, p)
    held = shards(layout)
    assert layout.n == n and layout.world_size == p == len(held)
    assert sorted(position for shard in held for position in shard) == list(range(n))
    assert layout.counts == tuple(map(len, held)) and layout.cuts == (0, *np.cumsum(layout.counts).tolist())


@pytest.mark.parametrize("name", NAMED)
def test_positions_are_fresh_int64(name: str) -> None:
    layout = NAMED[name](9, 2)
    first = layout.positions(0)
    assert first.dtype is torch.int64
    before = first.clone()
    first.fill_(-1)  # a caller's own copy
    assert layout.positions(0).equal(before)


@given(orders_and_cuts())
def test_from_cuts_holds_what_was_given(given_: tuple[list[int], tuple[int, ...]]) -> None:
    order, cuts = given_
    layout = Layout.from_cuts(order, cuts)
    assert layout.cuts == cuts
    assert shards(layout) == [order[a:b] for a, b in pairwise(cuts)]


@given(orders_and_cuts())
def test_runs_and_listing_agree(given_: tuple[list[int], tuple[int, ...]]) -> None:
    order, cuts = given_
    layout = Layout.from_cuts(order, cuts)
    assert (layout.runs is None) != (layout.listed is None)
    if layout.runs is None:
        return
    assert all(run.step >= 1 and run.length >= 1 for run in layout.runs)
    copy = listed_copy(layout)
    for rank in range(layout.world_size):
        assert runs_to_positions(layout.shard_runs(rank)) == order[cuts[rank] : cuts[rank + 1]]
        assert all(run.length >= 1 for run in layout.shard_runs(rank))
        assert copy.positions(rank).equal(layout.positions(rank))


@pytest.mark.parametrize("name", ("contiguous", "zigzag", "striped"))
@given(n=st.integers(0, 60), p=st.integers(1, 9))
def test_named_runs_are_the_shard(name: str, n: int, p: int) -> None:
    layout = NAMED[name](n, p)
    for rank in range(p):
        runs = layout.shard_runs(rank)
        assert runs_to_positions(runs) == layout.positions(rank).tolist()
        assert len(runs) <= 2 and all(run.length for run in runs)


@given(n=st.integers(0, 60), p=st.integers(1, 9))
def test_definitions(n: int, p: int) -> None:
    assert shards(Layout.contiguous(n, p)) == [list(range(r * n // p, (r + 1) * n // p)) for r in range(p)]
    assert shards(Layout.striped(n, p)) == [list(range(r, n, p)) for r in range(p)]
    chunk = [list(range(i * n // (2 * p), (i + 1) * n // (2 * p))) for i in range(2 * p)]
    assert shards(Layout.zigzag(n, p)) == [chunk[r] + chunk[2 * p - 1 - r] for r in range(p)]


def test_examples_on_paper() -> None:
    assert shards(Layout.contiguous(7, 2)) == [[0, 1, 2], [3, 4, 5, 6]]
    assert shards(Layout.zigzag(8, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert shards(Layout.striped(7, 3)) == [[0, 3, 6], [1, 4], [2, 5]]
    # The curve of a square of side 2 goes around three of its sides.
    assert sorted(map(tuple, (shards(Layout.hilbert(4, 1))[0],))) in ([(0, 2, 3, 1)], [(0, 1, 3, 2)])


@pytest.mark.parametrize("side", (1, 2, 4, 8, 16, 32))
def test_hilbert_goes_from_neighbour_to_neighbour(side: int) -> None:
    order = Layout.hilbert(side * side, 1).positions(0)
    x, y = order % side, order // side
    assert ((x.diff().abs() + y.diff().abs()) == 1).all()
    if side > 1:  # a Hilbert curve: each quarter of it stays in one quadrant, and it ends in a corner beside its start
        quarters = order.view(4, -1)
        for quarter in quarters:
            assert len({(int(p) % side >= side // 2, int(p) // side >= side // 2) for p in quarter}) == 1
        assert {int(order[0]), int(order[-1])} in ({0, side - 1}, {0, side * (side - 1)})


@pytest.mark.parametrize("n", (3, 5, 17, 50, 63))
def test_hilbert_of_part_of_a_square_keeps_the_order_of_the_curve(n: int) -> None:
    side = 1
    while side * side < n:
        side *= 2
    whole = Layout.hilbert(side * side, 1).positions(0).tolist()
    for p in (1, 2, 3):
        found = [position for shard in shards(Layout.hilbert(n, p)) for position in shard]
        assert found == [position for position in whole if position < n]
        assert Layout.hilbert(n, p).counts == tuple((r + 1) * n // p - r * n // p for r in range(p))


@given(orders_and_cuts(), st.integers(0, 2), st.integers(-1, 1))
def test_unshard_inverts_shard(given_: tuple[list[int], tuple[int, ...]], dim: int, negative: int) -> None:
    layout = Layout.from_cuts(*given_)
    dim = dim - 3 if negative < 0 else dim
    shape = [2, 3, 4]
    shape[dim] = layout.n
    x = torch.arange(int(np.prod(shape))).reshape(shape)
    parts = [layout.shard(x, rank, dim) for rank in range(layout.world_size)]
    for rank, part in enumerate(parts):
        assert part.equal(x.movedim(dim, 0)[layout.positions(rank)].movedim(0, dim))
    assert layout.unshard(parts, dim).equal(x)


def test_shard_carries_gradients() -> None:
    layout = Layout.zigzag(10, 2)
    x = torch.arange(10.0, requires_grad=True)
    layout.shard(x, 1, 0).sum().backward()
    assert x.grad is not None
    assert x.grad.nonzero().flatten().tolist() == sorted(layout.positions(1).tolist())


@pytest.mark.parametrize(
    "order, cuts, runs",
    [
        (range(12), (0, 12), 1),
        (range(12), (0, 5, 5, 12), 1),
        ([*range(6, 12), *range(6)], (0, 4, 12), 2),
        ([*range(0, 12, 2), *range(1, 12, 2)], (0, 6, 12), 2),
        ([0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8], (0, 6, 12), 3),
        (torch.arange(12), (0, 12), 1),
        (np.arange(12, dtype=np.int32), (0, 12), 1),
        ([5, 4, 3, 2, 1, 0], (0, 1, 2, 3, 4, 5, 6), 6),  # a run of one token goes anywhere
        ([], (0, 0, 0), 0),
    ],
)
def test_from_cuts_recognises_runs(order: Any, cuts: tuple[int, ...], runs: int) -> None:
    layout = Layout.from_cuts(order, cuts)
    assert layout.runs is not None and len(layout.runs) == runs


def test_from_cuts_lists_what_is_not_runs() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    layout = Layout.from_cuts(order, (0, 30, 64))
    assert layout.runs is None and layout.listed is not None
    assert layout.positions(1).equal(order[30:])


def test_from_cuts_keeps_no_hold_on_its_argument() -> None:
    order = np.random.default_rng(0).permutation(64)
    layout = Layout.from_cuts(order, (0, 30, 64))
    held, digest = shards(layout), layout.digest
    order[:] = 0
    assert shards(layout) == held and layout.digest == digest


def test_from_cuts_of_a_range_lists_no_positions() -> None:
    layout = Layout.from_cuts(range(2**40), (0, 5, 2**35, 2**40))
    assert layout.counts == (5, 2**35 - 5, 2**40 - 2**35)
    assert layout.shard_runs(1) == [(5, 1, 2**35 - 5)]


def test_no_more_tokens_than_plans_can_count() -> None:
    for make in (Layout.contiguous, Layout.zigzag, Layout.striped):
        assert sum(make(2**40, 3).counts) == 2**40
    for n in (2**40 + 1, 2**63, 10**30):
        for named in NAMED.values():
            with pytest.raises(ValueError, match=r"^n must be a number of tokens from 0 to 2\*\*40, got"):
                named(n, 2)
        with pytest.raises(ValueError, match="^n must"):
            Layout.from_cuts(range(n), (0, n))


@pytest.mark.parametrize("bad", (-1, 2.0, "4", None))
@pytest.mark.parametrize("name", NAMED)
def test_bad_sizes_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match="^n must"):
        NAMED[name](bad, 2)
    with pytest.raises(ValueError, match="^p must"):
        NAMED[name](4, bad)
    with pytest.raises(ValueError, match="^p must"):
        NAMED[name](4, 0)


@pytest.mark.parametrize("order", ([0, 1, 1], [0, 1, 3], [-1, 0, 1], [1, 2, 3], [0, 0, 2]))
def test_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="order must be a permutation"):
        Layout.from_cuts(order, (0, 3))


@pytest.mark.parametrize("order", ([0.0, 1.7, 2.2], [[0, 1, 2]], torch.tensor([0.2, 1.0, 2.0])))
def test_an_order_is_not_rounded_or_flattened(order: Any) -> None:
    with pytest.raises(ValueError, match="order must"):
        Layout.from_cuts(order, (0, 3))


@pytest.mark.parametrize("cuts", ((0, 1.5, 3), (0, "1", 3), (0, None, 3)))
def test_cuts_are_not_rounded(cuts: Any) -> None:
    with pytest.raises(ValueError, match="cuts must"):
        Layout.from_cuts(range(3), cuts)


@pytest.mark.parametrize("cuts", ((), (0,), (3,), (0, 2), (1, 3), (0, 2, 1, 3), (0, 4), (0, -1, 3), (0, 3, 2)))
def test_bad_cuts_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cuts must"):
        Layout.from_cuts(range(3), cuts)


@pytest.mark.parametrize("rank", (-1, 3, 100))
def test_ranks_outside_are_refused(rank: int) -> None:
    layout = Layout.contiguous(6, 3)
    for call in (layout.positions, layout.shard_runs, lambda r: layout.shard(torch.zeros(6), r, 0)):
        with pytest.raises(ValueError, match="rank must"):
            call(rank)


def test_wrong_lengths_are_refused() -> None:
    layout = Layout.from_cuts(range(6), (0, 2, 6))
    for tokens in (5, 7):
        with pytest.raises(ValueError, match=rf"^x must have 6 tokens along dim 1, got shape \(1, {tokens}\)$"):
            layout.shard(torch.zeros(1, tokens), 0)
    with pytest.raises(ValueError, match="shards must have"):
        layout.unshard([torch.zeros(1, 4), torch.zeros(1, 2)])  # swapped
    with pytest.raises(ValueError, match="shards must have"):
        layout.unshard([torch.zeros(1, 2)])


def test_equality_hash_and_digest() -> None:
    a, b = Layout.contiguous(12, 3), Layout.from_cuts(range(12), (0, 4, 8, 12))
    assert a == b and hash(a) == hash(b) and a.digest == b.digest and len(a.digest) == 16
    different = [
        Layout.contiguous(12, 4),
        Layout.contiguous(13, 3),
        Layout.from_cuts(range(12), (0, 4, 9, 12)),
        Layout.striped(12, 3),
        Layout.zigzag(12, 3),
        Layout.hilbert(12, 3),
        Layout.from_cuts(torch.randperm(12, generator=torch.Generator().manual_seed(0)), (0, 4, 8, 12)),
        Layout.from_cuts(torch.randperm(12, generator=torch.Generator().manual_seed(1)), (0, 4, 8, 12)),
    ]
    everything = [a, *different]
    assert len({layout.digest for layout in everything}) == len(everything) == len(set(everything))
    assert all(a != other for other in different)
    assert a != "contiguous"
    assert Layout.hilbert(50, 3) == Layout.hilbert(50, 3)


@given(orders_and_cuts(), orders_and_cuts())
def test_equal_means_equal_shards(
    one: tuple[list[int], tuple[int, ...]], other: tuple[list[int], tuple[int, ...]]
) -> None:
    a, b = Layout.from_cuts(*one), Layout.from_cuts(*other)
    assert (a == b) == (one == other)


@pytest.mark.parametrize("name", ("contiguous", "zigzag", "striped"))
def test_named_layouts_cost_nothing_per_token(name: str) -> None:
    n, p = 2**40, 64
    tracemalloc.start()
    begin = time.perf_counter()
    layout = NAMED[name](n, p)
    assert sum(layout.counts) == n and max(layout.counts) - min(layout.counts) <= 2
    runs = [run for rank in range(p) for run in layout.shard_runs(rank)]
    assert sum(run.length for run in runs) == n and len(runs) <= 2 * p
    assert layout == NAMED[name](n, p) and hash(layout) == hash(NAMED[name](n, p))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20  # 8 TiB for one int64 per token
    assert time.perf_counter() - begin < 5


# --- at the edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "cuts", "words"),
    [
        (3, (0, 3), "order must be one sequence of integers, got 0 dimensions"),
        ([0, 1, 4], (0, 3), "order must be a permutation of range(3); position 2 is missing"),
        ([0, 1, -1], (0, 3), "order must be a permutation of range(3); position 2 is missing"),
        ([], (0,), "cuts must be world size + 1 non-decreasing offsets from 0 to 0, got (0,)"),
        (range(3), (-1, 3), "cuts must be world size + 1 non-decreasing offsets from 0 to 3, got (-1, 3)"),
    ],
    ids=["a number", "beyond the last", "below the first", "of no rank", "from below 0"],
)
def test_what_is_no_order_or_no_cuts_is_refused_in_these_words(order: Any, cuts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        Layout.from_cuts(order, cuts)


def test_tokens_are_along_the_second_dimension_unless_said_otherwise() -> None:
    layout, x = Layout.zigzag(6, 2), torch.arange(12).view(2, 6)
    parts = [layout.shard(x, rank) for rank in range(2)]
    assert parts[0].equal(layout.shard(x, 0, 1)) and parts[0].shape == (2, 3)
    assert layout.unshard(parts).equal(x)


def test_equal_layouts_and_how_they_are_shown() -> None:
    assert Layout.contiguous(1, 1) == Layout.from_cuts([0], (0, 1))
    assert "listed" not in repr(Layout.hilbert(9, 1)), "a million positions are not for reading"


def test_hilbert_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Layout.hilbert(16, 1)


def test_a_range_that_ends_below_zero_is_empty() -> None:
    assert Layout.from_cuts(range(-3), [0, 0]) == Layout.contiguous(0, 1)
