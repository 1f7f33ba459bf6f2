"""Layouts: an order of the positions and cuts into it; every position in exactly one place, however it is made."""

from __future__ import annotations

import copy
import pickle
import re
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reference.pattern import Branch, Pattern
from ring.layout import Layout, Run, numbered_layout
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


@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.int64, torch.bfloat16))
def test_rows_of_any_type_come_back(dtype: torch.dtype) -> None:
    layout, x = Layout.zigzag(7, 3), torch.arange(14).view(2, 7).to(dtype)
    parts = tuple(layout.shard(x, rank) for rank in range(3))
    assert all(part.dtype is dtype for part in parts) and layout.unshard(parts).equal(x)


def test_gradients_go_through_shard_and_unshard() -> None:
    layout, x = Layout.zigzag(10, 2), torch.ones(10, requires_grad=True)
    layout.unshard([(rank + 1) * layout.shard(x, rank, 0) for rank in range(2)], 0).sum().backward()
    assert x.grad is not None
    assert [x.grad[layout.positions(rank)].unique().tolist() for rank in range(2)] == [[1.0], [2.0]]


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


@pytest.mark.parametrize("kind", (list, np.array, torch.tensor, partial(np.array, dtype=np.int32)))
def test_from_cuts_keeps_no_hold_on_its_arguments(kind: Callable[[Any], Any]) -> None:
    plain, cuts = np.random.default_rng(0).permutation(64).tolist(), [0, 30, 64]
    order = kind(plain)
    layout = Layout.from_cuts(order, cuts)
    digest = layout.digest
    order[0], order[1], cuts[1] = 0, 0, 31
    assert shards(layout) == [plain[:30], plain[30:]] and layout.digest == digest and layout.cuts == (0, 30, 64)


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


@pytest.mark.parametrize("wrong", (-1, 2.0, "4", None, True, np.int64(4)), ids=repr)
@pytest.mark.parametrize("name", (*NAMED, "balanced"))
def test_sizes_that_are_none_are_refused(name: str, wrong: Any) -> None:
    make = NAMED.get(name, lambda n, p: Layout.balanced(Pattern.dense(), n, p))
    with pytest.raises(ValueError, match=r"^n must be a number of tokens from 0 to 2\*\*40, got"):
        make(wrong, 2)
    for p in (wrong, 0):
        with pytest.raises(ValueError, match="^p must be a world size >= 1, got"):
            make(4, p)


MISSING, ONE_ROW = "order must be a permutation of range({}); position {} is missing", "order must be one sequence of"
SHARDS = "shards must have (2, 2, 2) tokens"
MAKE: Any = Layout  # whose types forbid what is wrong
CUTS, THREE = "cuts must be world size + 1 non-decreasing offsets from 0 to {}, got {}", Layout.contiguous(6, 3)
REFUSED: list[tuple[Callable[[], object], str]] = [
    *((partial(MAKE.from_cuts, order, (0, 3)), MISSING.format(3, at)) for order, at in (
        ([0, 1, 1], 2), ([0, 1, 3], 2), ([-1, 0, 1], 2), ([1, 2, 3], 0), ([0, 0, 2], 1), ([0, 1, -1], 2),
        (range(1, 4), 0), (range(0, 6, 2), 1), (torch.tensor([0, 2, 2]), 1),
    )),
    *((partial(MAKE.from_cuts, order, (0, 3)), f"{ONE_ROW} integers, got {got}") for order, got in (
        (3, "0 dimensions of int64"), ([0.0, 1.7, 2.2], "1 dimensions of float64"), ([[0, 1, 2]], "2 dimensions of"),
        (torch.tensor([0.2, 1.0, 2.0]), "1 dimensions of float32"), ([False, True], "1 dimensions of bool"),
    )),
    *((partial(MAKE.from_cuts, range(3), cuts), CUTS.format(3, cuts)) for cuts in (
        (), (0,), (3,), (0, 2), (1, 3), (0, 2, 1, 3), (0, 4), (0, -1, 3), (0, 3, 2), (-1, 3), (0, 1.5, 3),
        (0, "1", 3), (0, None, 3),
    )),
    (lambda: Layout.from_cuts([], (0,)), CUTS.format(0, (0,))),
    (partial(MAKE, "zigzag", 16, 1), "cuts and an order must be given, got ['zigzag', 16]; write Layout.zigzag("),
    (partial(MAKE, 16, 4), "cuts and an order must be given, got [16, 4]; write Layout.contiguous("),
    (partial(MAKE, 16, (0, 8, 16)), "cuts and an order must be given, got [16, (0, 8, 16)]; write Layout.contiguous("),
    *((partial(call, rank), f"rank must be in [0, 3), got {rank}") for rank in (-1, 3, 100)
      for call in (THREE.positions, THREE.shard_runs, partial(THREE.shard, torch.zeros(1, 6)))),
    *((partial(THREE.shard, torch.zeros(6, n), 0), f"x must have 6 tokens along dim 1, got shape (6, {n})")
      for n in (5, 7)),
    *((partial(THREE.unshard, [torch.zeros(1, n) for n in lengths]), f"{SHARDS} along dim 1, got {lengths}")
      for lengths in ((1, 2, 3), (2, 2), (2, 2, 2, 0), (6,))),
    (lambda: Layout.zigzag(12, 2, documents=(8, 3)), "documents must add up to the 12 tokens of the sequence, got 11"),
    (lambda: Layout.zigzag(4, 2, documents=()), "documents must add up to the 4 tokens of the sequence, got 0"),
    (lambda: Layout.zigzag(12, 2, documents=(13, -1)), "documents must be None or a tuple of lengths"),
    (lambda: Layout.balanced(Pattern.dense(True, (8, 3)), 12, 2), "documents must add up to the 12 tokens"),
    (lambda: Layout.balanced(Pattern.dense(), 2**28 + 1, 2), "n must be at most 2**28 for a balanced layout, got"),
    (lambda: Layout.balanced(Pattern.longnet((4,), (2,), 6), 24, 2, heads=4), "pattern must be one for the 4 query"),
    (lambda: Layout.balanced(Pattern((Branch(heads=range(3)),)), 4, 2, heads=2), "pattern must be one for the 2 query"),
    (lambda: Layout.balanced(Pattern.dense(), 4, 2, heads=0), "num_heads must be an integer >= 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_no_layout_or_does_not_fit_it_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        make()


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


# --- as a value -------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Layout], Layout]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda layout: pickle.loads(pickle.dumps(layout)),
}


@pytest.mark.parametrize("way", COPIES)
@given(drawn=orders_and_cuts())
def test_a_copy_is_equal_and_has_a_number_of_its_own(way: str, drawn: tuple[list[int], tuple[int, ...]]) -> None:
    layout = Layout.from_cuts(*drawn)
    made = COPIES[way](layout)
    assert made == layout and hash(made) == hash(layout) and shards(made) == shards(layout)
    assert made.number != layout.number and numbered_layout(made.number) is made


def test_a_number_finds_no_layout_that_is_gone() -> None:
    for number in (Layout.contiguous(2, 1).number, -1, 2**62):
        with pytest.raises(ValueError, match=f"^layout must be the number of one that is there, got {number}"):
            numbered_layout(number)


def test_fields_cannot_be_set() -> None:
    for field in fields(THREE):
        with pytest.raises(FrozenInstanceError):
            setattr(THREE, field.name, None)


@given(st.integers(1001, 1300), st.data())
def test_long_orders_that_differ_anywhere_are_two_layouts(tokens: int, data: st.DataObject) -> None:
    """NumPy prints so many without their middle."""
    at, order = data.draw(st.integers(0, tokens - 2)), np.random.default_rng(tokens).permutation(tokens)
    one = Layout.from_cuts(order, (0, tokens))
    order[[at, at + 1]] = order[[at + 1, at]]
    other = Layout.from_cuts(order, (0, tokens))
    assert one != other and one.digest != other.digest and shards(other) == [order.tolist()]


# --- at the edges -----------------------------------------------------------------------------------------------------


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
