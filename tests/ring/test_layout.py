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
from tests.support.plan_settings import listed

Drawn = tuple[list[int], tuple[int, ...]]  # an order and cuts into it
RUNS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
}
NAMED = RUNS | {"hilbert": Layout.hilbert}


def shards(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world_size)]


def of_runs(runs: list[Run]) -> list[int]:
    return [run.start + i * run.step for run in runs for i in range(run.length)]


@st.composite
def orders_and_cuts(draw: Any) -> Drawn:
    """From few runs, some of them interleaved, to plain permutations; empty shards occur."""
    n, step = draw(st.integers(0, 40)), draw(st.sampled_from((1, 1, 2, 3, 5)))
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=2)))
    parts = [range(n)[a:b][r::step] for a, b in pairwise((0, *edges, n)) for r in range(step)]
    order = [position for part in draw(st.permutations(parts)) for position in part]
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    inner = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    return order, (0, *inner, n)


@given(n=st.integers(0, 80), p=st.integers(1, 20))
@example(n=0, p=3)
@example(n=1, p=8)
@example(n=16, p=16)
def test_named_orders_are_as_defined(n: int, p: int) -> None:
    chunk = [list(range(i * n // (2 * p), (i + 1) * n // (2 * p))) for i in range(2 * p)]
    cuts = [r * n // p for r in range(p + 1)]
    defined = {
        "contiguous": [list(range(a, b)) for a, b in pairwise(cuts)],
        "striped": [list(range(r, n, p)) for r in range(p)],
        "zigzag": [chunk[r] + chunk[2 * p - 1 - r] for r in range(p)],
    }
    for name, held in defined.items():
        layout = NAMED[name](n, p)
        assert shards(layout) == held == [of_runs(layout.shard_runs(rank)) for rank in range(p)]
        assert layout.counts == tuple(map(len, held)) and layout.cuts == (0, *np.cumsum(layout.counts).tolist())
        assert layout.n == n and all(len(layout.shard_runs(rank)) <= 2 for rank in range(p))
        again = Layout.from_cuts([position for shard in held for position in shard], layout.cuts)
        assert again == layout if again.runs is not None else len(layout.runs or ()) > 2 * p


@pytest.mark.parametrize("side", (1, 2, 4, 8, 16, 32))
def test_hilbert_goes_from_neighbour_to_neighbour(side: int) -> None:
    order = Layout.hilbert(side * side, 1).positions(0)
    x, y = order % side, order // side
    assert ((x.diff().abs() + y.diff().abs()) == 1).all()
    if side > 1:  # a Hilbert curve: each quarter of it stays in one quadrant, and it ends in a corner beside its start
        for quarter in order.view(4, -1):
            assert len({(int(p) % side >= side // 2, int(p) // side >= side // 2) for p in quarter}) == 1
        assert {int(order[0]), int(order[-1])} in ({0, side - 1}, {0, side * (side - 1)})


@pytest.mark.parametrize(("n", "side"), ((0, 1), (3, 2), (5, 4), (17, 8), (50, 8), (63, 8)))
def test_hilbert_keeps_its_order_in_part_of_a_square(n: int, side: int) -> None:
    whole = [position for position in Layout.hilbert(side * side, 1).positions(0).tolist() if position < n]
    for p in (1, 2, 3, 70):
        with warnings.catch_warnings(action="error"):
            layout = Layout.hilbert(n, p)
        cuts = [r * n // p for r in range(p + 1)]
        assert shards(layout) == [whole[a:b] for a, b in pairwise(cuts)] and layout.cuts == tuple(cuts)


@pytest.mark.parametrize("name", ("contiguous", "hilbert"))
def test_positions_are_fresh_int64(name: str) -> None:
    layout = NAMED[name](9, 2)
    before = shards(layout)
    assert layout.positions(0).fill_(-1).dtype is torch.int64 and shards(layout) == before


@given(orders_and_cuts())
def test_from_cuts_holds_its_positions_as_runs_or_listed(drawn: Drawn) -> None:
    order, cuts = drawn
    layout = Layout.from_cuts(order, cuts)
    assert layout.cuts == cuts and shards(layout) == [order[a:b] for a, b in pairwise(cuts)]
    assert (layout.runs is None) != (layout.listed is None)
    if layout.runs is not None:
        assert all(run.step >= 1 and run.length >= 1 for run in layout.runs)
        assert [of_runs(layout.shard_runs(rank)) for rank in range(layout.world_size)] == shards(layout)
        assert all(run.length >= 1 for rank in range(layout.world_size) for run in layout.shard_runs(rank))
        assert shards(listed(layout)) == shards(layout)


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.bfloat16)


@given(orders_and_cuts(), st.integers(-3, 2), st.sampled_from(DTYPES))
def test_unshard_inverts_shard(drawn: Drawn, dim: int, dtype: torch.dtype) -> None:
    layout = Layout.from_cuts(*drawn)
    shape = [2, 3, 4]
    shape[dim] = layout.n
    x = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    parts = [layout.shard(x, rank, dim) for rank in range(layout.world_size)]
    for rank, part in enumerate(parts):
        assert part.equal(x.movedim(dim, 0)[layout.positions(rank)].movedim(0, dim))
    assert layout.unshard(tuple(parts), dim).equal(x)


def test_gradients_go_through_shard_and_unshard() -> None:
    layout, x = Layout.zigzag(10, 2), torch.ones(10, requires_grad=True)
    layout.unshard([(rank + 1) * layout.shard(x, rank, 0) for rank in range(2)], 0).sum().backward()
    assert x.grad is not None
    assert [x.grad[layout.positions(rank)].unique().tolist() for rank in range(2)] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    "order, cuts, runs",
    [
        (range(12), (0, 5, 5, 12), 1),
        ([*range(6, 12), *range(6)], (0, 4, 12), 2),
        ([*range(0, 12, 2), *range(1, 12, 2)], (0, 6, 12), 2),
        (torch.arange(12), (0, 12), 1),
        (np.arange(12, dtype=np.int32), (0, 12), 1),
        ([5, 4, 3, 2, 1, 0], (0, 1, 2, 3, 4, 5, 6), 6),  # a run of one token goes anywhere
        ([], (0, 0, 0), 0),
        (range(-3), (0, 0), 0),  # which ends below zero
    ],
)
def test_from_cuts_recognises_runs(order: Any, cuts: tuple[int, ...], runs: int) -> None:
    layout = Layout.from_cuts(order, cuts)
    assert layout.runs is not None and len(layout.runs) == runs


@pytest.mark.parametrize("kind", (list, np.array, torch.tensor, partial(np.array, dtype=np.int32)))
def test_from_cuts_keeps_no_hold_on_its_arguments(kind: Callable[[Any], Any]) -> None:
    plain, cuts = np.random.default_rng(0).permutation(64).tolist(), [0, 30, 64]
    order = kind(plain)
    layout = Layout.from_cuts(order, cuts)
    digest = layout.digest
    order[0], order[1], cuts[1] = 0, 0, 31
    assert layout.listed is not None, "so many runs are listed"
    assert shards(layout) == [plain[:30], plain[30:]] and layout.digest == digest and layout.cuts == (0, 30, 64)


def test_from_cuts_of_a_range_lists_no_positions() -> None:
    layout = Layout.from_cuts(range(2**40), (0, 5, 2**35, 2**40))
    assert layout.counts == (5, 2**35 - 5, 2**40 - 2**35)
    assert layout.shard_runs(1) == [(5, 1, 2**35 - 5)]


def test_no_more_tokens_than_plans_can_count() -> None:
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
        ([0, 1, 1], 2), ([0, 1, 3], 2), ([-1, 0, 1], 2), ([0, 0, 2], 1), (range(1, 4), 0), (range(0, 6, 2), 1),
    )),
    *((partial(MAKE.from_cuts, order, (0, 3)), f"{ONE_ROW} integers, got {got}") for order, got in (
        (3, "0 dimensions of int64"), ([0.0, 1.7, 2.2], "1 dimensions of float64"), ([[0, 1, 2]], "2 dimensions of"),
        (torch.tensor([0.2, 1.0, 2.0]), "1 dimensions of float32"), ([False, True], "1 dimensions of bool"),
    )),
    *((partial(MAKE.from_cuts, range(3), cuts), CUTS.format(3, cuts)) for cuts in (
        (), (0,), (0, 2), (1, 3), (0, 2, 1, 3), (0, 4), (0, -1, 3), (0, 1.5, 3), (0, "1", 3), (0, None, 3),
    )),
    (lambda: Layout.from_cuts([], (0,)), CUTS.format(0, (0,))),
    (lambda: Layout.from_cuts([0, 1, 0, 1], (0, 2, 4)), f"{MISSING.format(4, 2)}; a token is on one rank: of queries"),
    (partial(MAKE, "zigzag", 16, 1), "cuts and an order must be given, got ['zigzag', 16, 1]; write Layout.zigzag("),
    (partial(MAKE, "zigzag"), "cuts and an order must be given, got ['zigzag']; write Layout.zigzag(tokens, ranks)"),
    (partial(MAKE, "ring", 16, 1), "cuts and an order must be given, got ['ring', 16, 1]; write Layout.contiguous("),
    (partial(MAKE, 16, (0, 8, 16)), "cuts and an order must be given, got [16, (0, 8, 16)]; write Layout.contiguous("),
    (partial(MAKE, 16, (0, 8), (Run(0, 1, 16),)), CUTS.format(16, (0, 8))),
    (partial(MAKE, 16, (0, 8, 16), (Run(0, 1, 8),)), "runs must hold the 16 positions, got 8 in 1 runs"),
    (partial(Layout.from_cuts(range(5, -1, -1), (0, 3, 6)).shard_runs, 0), "order must be stored as runs, got a"),
    *((partial(call, rank), f"rank must be in [0, 3), got {rank}") for rank in (-1, 3, 100)
      for call in (THREE.positions, THREE.shard_runs, partial(THREE.shard, torch.zeros(1, 6)))),
    *((partial(THREE.shard, torch.zeros(6, n), 0), f"x must have 6 tokens along dim 1, got shape (6, {n})")
      for n in (5, 7)),
    *((partial(THREE.unshard, [torch.zeros(1, n) for n in lengths]), f"{SHARDS} along dim 1, got {lengths}")
      for lengths in ((1, 2, 3), (2, 2), (2, 2, 2, 0))),
    (lambda: Layout.zigzag(4, 2, documents=()), "documents must add up to the 4 tokens of the sequence, got 0"),
    (lambda: Layout.zigzag(12, 2, documents=(13, -1)), "documents must be None or a tuple of lengths"),
    (lambda: Layout.balanced(Pattern.dense(True, (8, 3)), 12, 2), "documents must add up to the 12 tokens"),
    (lambda: Layout.balanced(Pattern.dense(), 2**28 + 1, 2), "n must be at most 2**28 for a balanced layout, got"),
    (lambda: Layout.balanced(Pattern.longnet((4,), (2,), 6), 24, 2, heads=4), "pattern must be one for the 4 query"),
    (lambda: Layout.balanced(Pattern((Branch(heads=range(3)),)), 4, 2, heads=2), "pattern must be one for the 2 query"),
    (lambda: Layout.balanced(Pattern.dense(), 4, 2, heads=0), "num_heads must be an integer >= 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_malformed_layouts_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        make()


@pytest.mark.parametrize("name", RUNS)
def test_named_layouts_cost_nothing_per_token(name: str) -> None:
    n, p = 2**40, 64
    tracemalloc.start()
    begin = time.perf_counter()
    layout = NAMED[name](n, p)
    assert sum(run.length for rank in range(p) for run in layout.shard_runs(rank)) == sum(layout.counts) == n
    assert layout == NAMED[name](n, p) and hash(layout) == hash(NAMED[name](n, p))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20  # 8 TiB for one int64 per token
    assert time.perf_counter() - begin < 5


def test_equality_hash_and_digest() -> None:
    a, b = Layout.contiguous(12, 3), Layout.from_cuts(range(12), (0, 4, 8, 12))
    assert a == b and hash(a) == hash(b) and a.digest == b.digest and len(a.digest) == 16
    assert Layout.contiguous(1, 1) == Layout.from_cuts([0], (0, 1)) and Layout.hilbert(50, 3) == Layout.hilbert(50, 3)
    draw = np.random.default_rng(0)
    different = [
        a, Layout.contiguous(12, 4), Layout.contiguous(13, 3), Layout.from_cuts(range(12), (0, 4, 9, 12)),
        *(make(12, 3) for make in (Layout.striped, Layout.zigzag, Layout.hilbert)),
        *(Layout.from_cuts(draw.permutation(12), (0, 4, 8, 12)) for _ in range(2)),
    ]  # fmt: skip
    assert len({layout.digest for layout in different}) == len(different) == len(set(different))
    assert all(a != other for other in (*different[1:], "contiguous"))
    assert "listed" not in repr(Layout.hilbert(9, 1)), "a million positions are not for reading"


def test_runs_that_continue_each_other_are_one() -> None:
    def merged(*runs: tuple[int, int, int]) -> tuple[Run, ...] | None:
        n = sum(length for _, _, length in runs)
        return Layout(n, (0, n), tuple(Run(*run) for run in runs)).runs

    assert merged((0, 1, 3), (3, 1, 0), (3, 1, 2), (5, 7, 1)) == ((0, 1, 6),)
    assert merged((0, 2, 1), (2, 2, 2), (1, 1, 1), (3, 1, 1)) == ((0, 2, 3), (1, 2, 2))
    assert merged((0, 1, 2), (2, 2, 2), (3, 1, 1)) == ((0, 1, 3), (4, 1, 1), (3, 1, 1))
    assert merged((1, 1, 1), (0, 1, 1), (2, 3, 1)) == ((1, 1, 1), (0, 2, 2))


@given(orders_and_cuts())
def test_a_copy_is_equal_and_has_a_number_of_its_own(drawn: Drawn) -> None:
    layout = Layout.from_cuts(*drawn)
    for made in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert made == layout and hash(made) == hash(layout) and shards(made) == shards(layout)
        assert made.number != layout.number and numbered_layout(made.number) is made


def test_a_number_finds_no_layout_that_is_gone() -> None:
    for number in (Layout.contiguous(2, 1).number, -1, 2**62):
        with pytest.raises(ValueError, match=f"^layout must be the number of an existing one, got {number}"):
            numbered_layout(number)


def test_fields_cannot_be_set() -> None:
    for field in fields(THREE):
        with pytest.raises(FrozenInstanceError):
            setattr(THREE, field.name, None)


@given(st.integers(1001, 1300), st.data())
def test_long_layouts_differ_by_any_position(tokens: int, data: st.DataObject) -> None:
    """NumPy prints so many without their middle."""
    at, order = data.draw(st.integers(0, tokens - 2)), np.random.default_rng(tokens).permutation(tokens)
    one = Layout.from_cuts(order, (0, tokens))
    order[[at, at + 1]] = order[[at + 1, at]]
    other = Layout.from_cuts(order, (0, tokens))
    assert one != other and one.digest != other.digest and shards(other) == [order.tolist()]
