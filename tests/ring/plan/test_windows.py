"""Plans of sliding windows: what is sent, and how many kernel calls they take."""

from __future__ import annotations

import pytest

from reference.pattern import Branch, Pattern
from ring.layout import Layout
from ring.plan.exchange import key_exchange
from ring.plan.exchanges import DIRECT
from ring.plan.plan import Plan, plan_of
from ring.plan.tile import Mask

WINDOW = 63


def plans(pattern: Pattern, layout: Layout, exchange: str = "direct") -> list[Plan]:
    return [plan_of(pattern, layout, rank, 2, 2, key_exchange(exchange), layout.n) for rank in range(layout.world_size)]


@pytest.mark.parametrize(
    ("window", "causal", "exchange", "wanted"),
    (
        (WINDOW, True, "ring", {1: WINDOW}),
        (WINDOW, False, "direct", {-1: WINDOW, 1: WINDOW}),
        (300, True, "direct", {1: 256, 2: 300 - 256}),  # longer than a shard
    ),
)
def test_contiguous_shards_send_what_the_window_reaches(
    window: int, causal: bool, exchange: str, wanted: dict[int, int]
) -> None:
    """wanted: by how many ranks further on, tokens; two slots each."""
    for rank, plan in enumerate(plans(Pattern.dense(causal, window=window), Layout.contiguous(4 * 256, 4), exchange)):
        sent = [(one.peer, one.stop - one.start) for step in plan.steps for one in step.sends]
        assert sorted(sent) == [(rank + by, 2 * tokens) for by, tokens in wanted.items() if rank + by in range(4)]


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_kernel_calls_do_not_grow_with_the_sequence(order: str, causal: bool) -> None:
    """Parts of a window are folded: a longer sequence has more folds, and as many calls."""
    calls = []
    for n in (2048, 16384):
        found = plans(Pattern.dense(causal, window=WINDOW), getattr(Layout, order)(n, 4))
        calls.append([[x.mask for x in (*plan.local, *(t for y in plan.steps for t in y.tiles))] for plan in found])
    assert calls[0] == calls[1] and not any(Mask.POSITION in masks for masks in calls[0])


@pytest.mark.parametrize(("window", "longest", "copied"), [(63, 0, True), (63, 62, True), (63, 63, False)])
def test_calls_that_take_windows_copy_no_rows(window: int, longest: int, copied: bool) -> None:
    """Keys of the rank before: without a window of its own a call has them, and their queries, in reverse order."""
    layout = Layout.contiguous(4 * 256, 4)
    plan = plan_of(Pattern.dense(True, window=window), layout, 1, 2, 2, DIRECT, layout.n, window=longest)
    (tile,) = plan.steps[0].tiles
    assert tile.mask is (Mask.CAUSAL if copied else Mask.ANTICAUSAL) and tile.query_rows.length == window
    assert (tile.query_rows.index is not None) is (tile.key_rows.index is not None) is copied


@pytest.mark.parametrize("window", [WINDOW, 10**12])
def test_a_window_that_hides_nothing_is_none(window: int) -> None:
    layout = Layout.contiguous(128, 2)
    of_segments, local = Branch(64), Branch(64, window=window)
    for without, found in zip(plans(Pattern((of_segments,)), layout), plans(Pattern((local,)), layout), strict=True):
        assert [tile.query_rows.key for tile in found.local] == [tile.query_rows.key for tile in without.local]
        assert [tile.mask for tile in found.local] == [Mask.FULL]
