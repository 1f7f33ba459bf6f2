"""The second statement of layouts and of the default bucket: on paper, as properties, and beside the ring's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import shards as definitions
from reference.shards import LEAST_BUCKET, default_bucket, shards
from ring.budget import default_bucket as ring_bucket
from ring.layout import Layout
from verification.run.layouts import _layout

ORDERS = (
    *("contiguous", "zigzag", "striped", "hilbert", "spliced", "stepped", "paired", "shuffled", "permuted", "swapped"),
    "dealt",
)


def held(order: str, n: int, p: int, cuts: tuple[int, ...] | None = None, seed: int = 0) -> list[list[int]]:
    return [x.tolist() for x in shards(order, n, p, cuts, seed).positions]


@pytest.mark.parametrize(
    ("order", "n", "p", "cuts", "wanted"),
    [
        ("contiguous", 7, 3, None, [[0, 1], [2, 3], [4, 5, 6]]),
        ("contiguous", 2, 3, None, [[], [0], [1]]),
        ("contiguous", 5, 3, (0, 0, 4, 5), [[], [0, 1, 2, 3], [4]]),
        ("zigzag", 8, 2, None, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", 6, 2, None, [[0, 4, 5], [1, 2, 3]]),  # chunks 0 | 1 2 | 3 | 4 5
        ("zigzag", 8, 2, (0, 3, 8), [[0, 1, 6], [7, 2, 3, 4, 5]]),
        ("zigzag", 3, 4, None, [[2], [], [0, 1], []]),  # chunks 2, 5 and 7 of 8 hold one each
        ("striped", 7, 3, None, [[0, 3, 6], [1, 4], [2, 5]]),
        ("striped", 7, 3, (0, 1, 6, 7), [[0], [3, 6, 1, 4, 2], [5]]),
        ("stepped", 9, 2, None, [[0, 1, 5, 7], [2, 3, 4, 6, 8]]),
        ("paired", 9, 4, None, [[0, 1], [4, 5], [2, 3], [6, 7, 8]]),
        ("paired", 5, 3, (0, 0, 4, 5), [[], [0, 3, 4, 1], [2]]),  # runs of ranks 0, 1, 2: 0 | 3 4 | 1 2
        ("hilbert", 4, 1, None, [[0, 2, 3, 1]]),
        ("hilbert", 16, 2, None, [[0, 1, 5, 4, 8, 12, 13, 9], [10, 14, 15, 11, 7, 6, 2, 3]]),
        ("hilbert", 5, 2, None, [[0, 1], [4, 2, 3]]),  # of the curve of 16: 0 1 4 2 3
    ],
)
def test_on_paper(order: str, n: int, p: int, cuts: tuple[int, ...] | None, wanted: list[list[int]]) -> None:
    assert held(order, n, p, cuts) == wanted


@pytest.mark.parametrize(
    ("order", "documents", "wanted"),
    [
        ("contiguous", (4, 0, 2), [[0, 1, 4], [2, 3, 5]]),
        ("contiguous", (3, 1), [[0], [1, 2, 3]]),  # 0 | 1 2, and all of the second
        ("zigzag", (8, 4), [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
        ("zigzag", None, [[0, 3], [1, 2]]),
    ],
)
def test_by_document_on_paper(order: str, documents: tuple[int, ...] | None, wanted: list[list[int]]) -> None:
    n = sum(map(len, wanted))
    assert [x.tolist() for x in shards(f"{order} by document", n, 2, None, 0, documents).positions] == wanted


@given(st.sampled_from(("contiguous", "zigzag")), st.integers(1, 5), st.lists(st.integers(0, 20), min_size=1))
def test_the_ring_s_layouts_by_document_are_these(order: str, p: int, documents: list[int]) -> None:
    order, n = f"{order} by document", sum(documents)
    layout, found = _layout(order, n, p, None, 0, tuple(documents)), shards(order, n, p, None, 0, tuple(documents))
    assert found.counts == layout.counts
    assert all(layout.positions(rank).tolist() == found.positions[rank].tolist() for rank in range(p))


@pytest.mark.parametrize("order", ("random", "random by document"))
def test_an_unknown_order_is_refused(order: str) -> None:
    with pytest.raises(ValueError, match="order is 'random'"):
        shards(order, 4, 2, None)


@given(st.sampled_from(ORDERS), st.integers(1, 80), st.integers(1, 9), st.integers(0, 3))
def test_every_position_is_held_once(order: str, n: int, p: int, seed: int) -> None:
    found = shards(order, n, p, None, seed)
    laid = np.concatenate(found.positions)
    assert laid.dtype == np.int64 and sorted(laid.tolist()) == list(range(n))
    assert laid[found.place].tolist() == list(range(n))
    assert [int(found.holder[x[0]]) for x in found.positions if len(x)] == [r for r in range(p) if found.counts[r]]
    assert found.counts == tuple(map(len, held(order, n, p, None, seed)))
    if order not in ("zigzag", "spliced", "stepped", "dealt"):  # several chunks of a rank may be the longer ones
        assert max(found.counts) - min(found.counts) <= 1


@given(st.sampled_from(ORDERS), st.integers(1, 80), st.integers(1, 9), st.data())
def test_the_ring_s_layouts_are_these(order: str, n: int, p: int, data: st.DataObject) -> None:
    own = _layout(order, n, p, None, 3)
    laid = torch.cat([own.positions(rank) for rank in range(p)])
    inner = sorted(data.draw(st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)))
    cuts = (0, *inner, n)
    for layout, given_cuts in ((own, None), (Layout.from_cuts(laid, cuts), cuts)):
        found = shards(order, n, p, given_cuts, 3)
        assert found.counts == layout.counts
        for rank in range(p):
            assert layout.positions(rank).tolist() == found.positions[rank].tolist()


def test_long_sequences_too() -> None:
    for order in ORDERS:
        layout, found = _layout(order, 8191, 5, None, 0), shards(order, 8191, 5, None)
        assert all(np.array_equal(layout.positions(rank).numpy(), found.positions[rank]) for rank in range(5))


@pytest.mark.parametrize("side", (1, 2, 4, 8, 16, 32))
def test_the_curve_goes_from_neighbour_to_neighbour_and_fills_quarter_by_quarter(side: int) -> None:
    x, y = definitions._curve(side)
    assert (np.abs(np.diff(x)) + np.abs(np.diff(y)) == 1).all()
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, side - 1, 0)
    if side > 1:
        quarter = (2 * x // side) + 2 * (2 * y // side)
        assert [set(part) for part in quarter.reshape(4, -1).tolist()] == [{0}, {2}, {3}, {1}]


def test_a_shuffled_order_follows_from_the_seed() -> None:
    assert held("shuffled", 20, 3, None, 5) == held("shuffled", 20, 3, None, 5) != held("shuffled", 20, 3, None, 6)


def test_a_permuted_order_is_a_few_stretches() -> None:
    for n, p in ((1, 1), (2, 3), (5, 2), (40, 3)):
        found = {tuple(definitions.permuted(n, p, seed).tolist()) for seed in range(20)}
        for laid in found:
            assert sorted(laid) == list(range(n)) and sum(np.diff(laid) != 1) < 2 * p
        assert len(found) > 10 or n < 3
    assert max(len(np.flatnonzero(np.diff(definitions.permuted(40, 3, seed)) != 1)) + 1 for seed in range(20)) == 6
    assert held("permuted", 20, 3, None, 5) == held("permuted", 20, 3, None, 5) != held("permuted", 20, 3, None, 6)
    assert held("permuted", 12, 2, None, 0) == [definitions.permuted(12, 2, 0)[i : i + 6].tolist() for i in (0, 6)]


def test_what_is_cached_cannot_be_changed() -> None:
    found = shards("zigzag", 12, 2, None)
    for x in (*found.positions, found.place, found.holder):
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 0


def test_default_bucket_on_paper() -> None:
    # An element each of q, k, v and out: 16 bytes of fp32. A token of a bucket: 2 (2 x 4 + 3 x 4) bytes.
    assert default_bucket(100_000, heads=1, kv_heads=1, itemsize=4) == 100_000 * 16 // (10 * 40) == 4000
    assert default_bucket(10_000, heads=8, kv_heads=1, itemsize=4) == 10_000 * 72 // (10 * 40) == 1800
    assert default_bucket(10_000, heads=8, kv_heads=1, itemsize=8) == 10_000 * 144 // (10 * 80) == 1800
    assert default_bucket(10_000, heads=8, kv_heads=1, itemsize=2) == 10_000 * 36 // (10 * 32) == 1125
    assert default_bucket(10, heads=1, kv_heads=1, itemsize=4) == 1024
    assert default_bucket(25_600, heads=1, kv_heads=1, itemsize=4) == 1024
    assert default_bucket(25_625, heads=1, kv_heads=1, itemsize=4) == 1025
    assert default_bucket(1_638_400, heads=1, kv_heads=1, itemsize=4, device="cuda") == 65_536
    assert default_bucket(1_638_425, heads=1, kv_heads=1, itemsize=4, device="cuda") == 65_537


@given(
    st.integers(1, 50_000) | st.integers(10**6, 10**7),
    st.sampled_from([(1, 1), (4, 2), (6, 1), (12, 12)]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.sampled_from(["cpu", "cuda", "mps"]),
)
def test_the_ring_s_default_bucket_is_this(n: int, heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    for world in (1, 3):
        layout = Layout.zigzag(n, world)
        wanted = default_bucket(max(layout.counts), *heads, dtype.itemsize, device)
        assert ring_bucket(layout, *heads, dtype, device) == wanted


def test_the_ring_takes_a_cpu_s_default_bucket_unless_told_otherwise() -> None:
    assert ring_bucket(Layout.contiguous(100, 1), 1, 1, torch.float32) == LEAST_BUCKET


@pytest.mark.parametrize("cuts", ((0, 9000, 9001, 9002), (0, 1, 9001, 9002), (0, 1, 2, 9002)), ids=str)
def test_the_default_bucket_goes_by_the_largest_shard_wherever_it_is(cuts: tuple[int, ...]) -> None:
    layout = Layout.from_cuts(range(9002), cuts)
    assert ring_bucket(layout, 8, 1, torch.float32) == default_bucket(9000, 8, 1, 4) == 9000 * 72 // (10 * 40)


def test_a_swapped_order_is_nearly_contiguous() -> None:
    for n in (1, 2, 5, 40):
        found = {tuple(definitions.swapped(n, seed).tolist()) for seed in range(40)}
        assert all(sorted(laid) == list(range(n)) and np.count_nonzero(laid - np.arange(n)) <= 6 for laid in found)
        assert len(found) > 10 or n < 5
    assert definitions.swapped(8, 3).tolist() == definitions.swapped(8, 3).tolist()
