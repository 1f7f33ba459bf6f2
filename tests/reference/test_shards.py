"""The second statement of layouts and of the default bucket: on paper, as properties, and beside the ring's own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.shards import BY_CHUNK, default_bucket, holds_whole_chunks, shards
from ring.default_bucket import default_bucket as ring_bucket
from ring.layout import Layout
from verification.run.layouts import _layout

ORDERS = (
    *("contiguous", "zigzag", "striped", "hilbert", "spliced", "stepped", "paired", "shuffled", "permuted", "swapped"),
    "dealt",
)
UNEVEN = ("zigzag", "spliced", "stepped", "dealt")  # several chunks of a rank may be the longer ones


@pytest.mark.parametrize(
    ("order", "given_", "wanted"),
    [
        ("contiguous", None, [[0, 1], [2, 3], [4, 5, 6]]),
        ("contiguous", None, [[], [0], [1]]),
        ("contiguous", (0, 0, 4, 5), [[], [0, 1, 2, 3], [4]]),
        ("zigzag", None, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", None, [[0, 4, 5], [1, 2, 3]]),  # chunks 0 | 1 2 | 3 | 4 5
        ("zigzag", (0, 3, 8), [[0, 1, 6], [7, 2, 3, 4, 5]]),
        ("zigzag", None, [[2], [], [0, 1], []]),  # chunks 2, 5 and 7 of 8 hold one each
        ("striped", None, [[0, 3, 6], [1, 4], [2, 5]]),
        ("striped", (0, 1, 6, 7), [[0], [3, 6, 1, 4, 2], [5]]),
        ("stepped", None, [[0, 1, 5, 7], [2, 3, 4, 6, 8]]),
        ("paired", None, [[0, 1], [4, 5], [2, 3], [6, 7, 8]]),
        ("paired", (0, 0, 4, 5), [[], [0, 3, 4, 1], [2]]),  # runs of ranks 0, 1, 2: 0 | 3 4 | 1 2
        ("hilbert", None, [[0, 2, 3, 1]]),
        ("hilbert", None, [[0, 1, 5, 4, 8, 12, 13, 9], [10, 14, 15, 11, 7, 6, 2, 3]]),
        ("hilbert", None, [[0, 1], [4, 2, 3]]),  # of the curve of 16: 0 1 4 2 3
        ("contiguous by document", (4, 0, 2), [[0, 1, 4], [2, 3, 5]]),
        ("contiguous by document", (3, 1), [[0], [1, 2, 3]]),  # 0 | 1 2, and all of the second
        ("zigzag by document", (8, 4), [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
        ("zigzag by document", None, [[0, 3], [1, 2]]),
        ("chunks", None, [[0, 1, 2, 3, 8], [4, 5, 6, 7]]),  # 5 chunks: the first of 4 groups has two
        ("chunks", (3, 0, 1, 4), [[0, 1], [2, 6, 7], [3, 4, 5]]),  # 01 2 | 3 | 45 67 in 6 groups, the last one empty
        ("chunks", None, [[0], [], []]),
    ],
)
def test_on_paper(order: str, given_: tuple[int, ...] | None, wanted: list[list[int]]) -> None:
    """given_: where it is cut, or the lengths of documents. A chunk has two tokens."""
    divided = (None, 0, given_, 2) if "document" in order or order == "chunks" else (given_,)
    assert [x.tolist() for x in shards(order, sum(map(len, wanted)), len(wanted), *divided).positions] == wanted


@given(st.sampled_from(("contiguous", "zigzag")), st.integers(1, 5), st.lists(st.integers(0, 20), min_size=1))
def test_layouts_by_document_equal_the_rings(order: str, p: int, documents: list[int]) -> None:
    order, n = f"{order} by document", sum(documents)
    layout, found = _layout(order, n, p, None, 0, tuple(documents)), shards(order, n, p, None, 0, tuple(documents))
    assert found.counts == layout.counts
    assert all(layout.positions(rank).tolist() == found.positions[rank].tolist() for rank in range(p))


@given(st.sampled_from(ORDERS), st.integers(1, 80) | st.just(8191), st.integers(1, 9), st.data())
def test_layouts_equal_the_rings_and_hold_each_position_once(order: str, n: int, p: int, data: st.DataObject) -> None:
    own = _layout(order, n, p, None, 3)
    laid = torch.cat([own.positions(rank) for rank in range(p)])
    assert sorted(laid.tolist()) == list(range(n))
    inner = sorted(data.draw(st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)))
    cuts = (0, *inner, n)
    for layout, given_cuts in ((own, None), (Layout.from_cuts(laid, cuts), cuts)):
        found = shards(order, n, p, given_cuts, 3)
        assert found.counts == layout.counts == tuple(map(len, found.positions))
        for rank, held in enumerate(found.positions):
            assert held.dtype == np.int64 and layout.positions(rank).tolist() == held.tolist()
            assert (found.holder[held] == rank).all()
        for cached in (*found.positions, found.place, found.holder):
            assert not cached.flags.writeable
        assert np.concatenate(found.positions)[found.place].tolist() == list(range(n))
    assert order in UNEVEN or max(own.counts) - min(own.counts) <= 1


@given(st.integers(1, 6), st.lists(st.integers(0, 20), min_size=1).filter(sum), st.integers(1, 7), st.integers(0, 99))
def test_orders_of_chunks_keep_chunks_whole(p: int, documents: list[int], chunk: int, seed: int) -> None:
    n, lengths = sum(documents), tuple(documents)
    numbers = [(d, x // chunk) for d, length in enumerate(documents) for x in range(length)]
    for order in BY_CHUNK:
        held = shards(order, n, p, None, seed, lengths, chunk)
        layout = _layout(order, n, p, None, seed, lengths, chunk)
        assert all(layout.positions(rank).tolist() == held.positions[rank].tolist() for rank in range(p))
        assert holds_whole_chunks(held, chunk, lengths)
        for own in held.positions:  # a chunk that begins on a rank ends there
            of_rank = [numbers[x] for x in own.tolist()]
            assert all(of_rank.count(number) == numbers.count(number) for number in of_rank)


@pytest.mark.parametrize("order", ("random", "random by document", "chunks"))
def test_an_unknown_order_is_refused(order: str) -> None:
    with pytest.raises(ValueError, match="order is '(random|chunks)'"):
        shards(order, 4, 2, None)


@pytest.mark.parametrize(("n", "p"), ((1, 1), (2, 3), (5, 2), (40, 3)))
def test_seeded_orders_repeat_with_the_seed(n: int, p: int) -> None:
    made = {
        order: [np.concatenate(shards(order, n, p, None, seed).positions) for seed in range(20)]
        for order in ("shuffled", "permuted", "swapped")
    }
    for order, listings in made.items():
        shards.cache_clear()
        assert all(sorted(laid) == list(range(n)) for laid in listings)
        assert np.array_equal(listings[7], np.concatenate(shards(order, n, p, None, 7).positions))
        assert len({tuple(laid.tolist()) for laid in listings}) > 10 or n < 6
    assert all(np.count_nonzero(laid - np.arange(n)) <= 6 for laid in made["swapped"])
    stretches = [np.count_nonzero(np.diff(laid) != 1) + 1 for laid in made["permuted"]]
    assert max(stretches) <= 2 * p and (n < 40 or max(stretches) == 6)


@pytest.mark.parametrize(
    ("largest", "heads", "itemsize", "device", "wanted"),
    [
        # An element each of q, k, v and out: 16 bytes of fp32. A token of a bucket: 2 (2 x 4 + 3 x 4) bytes.
        (100_000, 1, 4, "cpu", 100_000 * 16 // (10 * 40)),
        (10_000, 8, 4, "cpu", 10_000 * 72 // (10 * 40)),
        (10_000, 8, 8, "cpu", 10_000 * 144 // (10 * 80)),
        (10_000, 8, 2, "cpu", 10_000 * 36 // (10 * 32)),
        (10, 1, 4, "cpu", 1024),
        (25_600, 1, 4, "cpu", 1024),
        (25_625, 1, 4, "cpu", 1025),
        (1_638_400, 1, 4, "cuda", 65_536),
        (1_638_425, 1, 4, "cuda", 65_537),
    ],
)
def test_default_bucket_on_paper(largest: int, heads: int, itemsize: int, device: str, wanted: int) -> None:
    assert default_bucket(largest, heads, 1, itemsize, device) == wanted


@pytest.mark.parametrize("cuts", ((0, 9000, 9001, 9002), (0, 1, 9001, 9002), (0, 1, 2, 9002)), ids=str)
def test_default_bucket_follows_the_largest_shard(cuts: tuple[int, ...]) -> None:
    layout = Layout.from_cuts(range(9002), cuts)
    assert ring_bucket(layout, 8, 1, torch.float32) == default_bucket(9000, 8, 1, 4) == 9000 * 72 // (10 * 40)
    keys = Layout.contiguous(15_000, 3)
    wanted = default_bucket(9000, 8, 1, 4, largest_of_keys=5000)
    assert ring_bucket(layout, 8, 1, torch.float32, key_layout=keys) == wanted == (9000 * 64 + 5000 * 8) // (10 * 40)
