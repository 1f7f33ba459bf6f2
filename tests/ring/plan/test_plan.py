"""Plans without a tensor of data: an interpreter follows all ranks, and the oracle counts what they must do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reference import closed_forms
from reference.pattern import Branch, Pattern
from reference.slices import Slice
from ring.default_bucket import default_local_bucket
from ring.layout import Layout
from ring.plan import remote_rows
from ring.plan.exchanges import DIRECT, KEY_EXCHANGES, RING
from ring.plan.plan import Plan, plan_of
from ring.plan.tile import Mask, Tile
from tests.ring.plan.plan_walk import PlanSetting, check, check_calls
from tests.support.plan_settings import drawn_settings, listed, stretched_settings


def setting_of(
    pattern: Pattern, layout: Layout, exchange: str, bucket: int = 1000, heads: tuple[int, int] = (2, 1)
) -> PlanSetting:
    return PlanSetting(pattern, layout, *heads, exchange, bucket)


@pytest.mark.slow
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_settings())
@example(setting_of(Pattern.dense(), Layout.contiguous(0, 3), "ring", 4))
# A distance that is cut is a round by itself, whatever room the one before left.
@example(setting_of(Pattern((Branch(8, 1),)), Layout.from_cuts([0, 1, 2, 3, 8, 9, 4, 5, 6, 7], (0, 5, 6, 10, 10)),
                    "direct", 2, (1, 1)))  # fmt: skip
# Two branches whose heads read the same keys: gathered, listed, and of grids that meet in every other segment.
@example(setting_of(Pattern((Branch(None, 1, 0, range(0, 1)), Branch(None, 1, 0, range(1, 2)))),
                    Layout.contiguous(8, 2), "gather"))  # fmt: skip
@example(setting_of(Pattern((Branch(8, 2, 0, range(0, 1)), Branch(4, 1, 0, range(1, 2)))),
                    Layout.from_cuts([0, 4, 6, 7, 1, 3, 8, 9, 10, 11, 2, 5, 12, 13, 14, 15], (0, 16)),
                    "ring", 4, (4, 2)))  # fmt: skip
@example(setting_of(Pattern((Branch(4, 2, (0, 1), range(0, 2)), Branch(6, 2, 0, range(2, 3)))),
                    Layout.from_cuts(list(range(10)), (0, 4, 10)), "ring", heads=(3, 1)))  # fmt: skip
# A diagonal that begins at the third key of a message, whose keys take two slots each.
@example(setting_of(Pattern.dense(True), Layout.from_cuts([*range(0, 12, 2), *range(1, 12, 2)], (0, 8, 12)),
                    "ring", heads=(2, 2)))  # fmt: skip
@example(setting_of(Pattern.longnet((4, 8), (1, 2), 4, True), Layout.striped(24, 4), "direct", 3, (4, 2)))
# Rank 0 sends narrow rows alone; buffers go by the widest row of any rank.
@example(setting_of(Pattern((Branch(12), Branch(None, 3, (0, 1, 2))), documents=(16, 32)), Layout.contiguous(48, 4),
                    "direct", 2, (3, 3)))  # fmt: skip
def test_plans_compute_and_send_exactly_the_pattern(setting: PlanSetting) -> None:
    check(setting)
    for bucket in range(1, setting.layout.n + 1, 3):
        own = None if setting.own is None else bucket + 5
        check_calls(replace(setting, bucket=bucket, own=own))
    if setting.layout.n:
        check(replace(setting, layout=listed(setting.layout)))


@pytest.mark.parametrize("bucket", (2, 1000))
@pytest.mark.parametrize(
    "pattern", (Pattern.dense(True), Pattern.longnet((6, None), (1, 2), 2, True), Pattern((Branch(8, 2),)))
)
@pytest.mark.parametrize(
    "runs",
    (
        (range(0, 20, 2), range(1, 20, 2)),  # a rank with two runs that see prefixes of one range, of unequal length
        (range(12, 20), range(0, 12, 3), range(1, 12, 3), range(2, 12, 3)),  # steps 1 and 3
        (range(0, 20, 4), range(1, 20, 2), range(2, 20, 4)),  # steps 4 and 2, interleaved
        # Segments of 8 that look alike but for the step of their keys.
        (range(4), range(8, 12, 2), range(4, 8), range(12, 20), range(9, 12, 2)),
    ),
)
def test_interleaved_runs(runs: tuple[range, ...], pattern: Pattern, bucket: int) -> None:
    order = [position for run in runs for position in run]
    for cuts, exchange in zip(((0, 6, 12, 20), (0, 3, 3, 20), (0, 10, 16, 20)), KEY_EXCHANGES, strict=True):
        layout = Layout.from_cuts(order, cuts)
        assert layout.runs is not None
        check(setting_of(pattern, layout, exchange, bucket))


@pytest.mark.parametrize("other", (Slice(3, 6, 2, 5, high=-1), Slice(2, 5, 3, 6, high=1)), ids=("key", "query"))
def test_triangles_that_share_one_row_are_two_calls(other: Slice) -> None:
    check(setting_of(Pattern((Branch(slices=(Slice(0, 3, 0, 3, high=0), other)),)), Layout.contiguous(6, 1), "direct"))


@pytest.mark.parametrize("exchange", ("ring", "direct"))
@pytest.mark.parametrize("order", ("zigzag", "striped", "hilbert"))
@pytest.mark.parametrize("causal", (False, True))
def test_needs_are_equal_range_by_range(
    order: str, causal: bool, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_rows, "_BATCH", 1)
    branches = Branch(None, 1, window=5), Branch(8, 2, window=2), Branch(16, 1)
    pattern = Pattern(branches, causal=causal, documents=(3, 0, 20, 18))
    check(setting_of(pattern, getattr(Layout, order)(41, 3), exchange, 4))


@pytest.mark.parametrize("exchange", KEY_EXCHANGES)
@pytest.mark.parametrize("order", ("striped", "hilbert"))
def test_sixteen_ranks(order: str, exchange: str) -> None:
    pattern = Pattern((Branch(24, 2, (0, 1, 1, 0)), Branch(7, 3, 2, range(1, 3)), Branch(None, 4)), True)
    with np.errstate(all="raise"):  # a warning would be the user's to see
        check(setting_of(pattern, getattr(Layout, order)(50, 16), exchange, 2, (4, 2)))


@pytest.mark.parametrize("bucket", range(1, 10))
def test_a_message_of_one_row_behind_one_beyond_the_cap(bucket: int) -> None:
    """One rank to the next: up to 9 rows, in chunks; to the one after that, the one token of rank 0."""
    check(setting_of(Pattern.dense(True), Layout.from_cuts(range(20), (0, 1, 10, 20)), "direct", bucket, (1, 1)))


def layout_of_segments(count: int, length: int, *owned: int) -> Layout:
    """Contiguous segments, of each of which the ranks have so many tokens, one after the other."""
    owner = np.repeat(np.arange(len(owned)), owned)
    order = sorted(range(count * length), key=lambda x: (owner[x % length], x))
    return Layout.from_cuts(order, np.cumsum([0, *(count * share for share in owned)]).tolist())


@pytest.mark.parametrize("exchange", KEY_EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("branch", "layout"),
    (
        (Branch(5), layout_of_segments(12, 5, 1, 4)),  # a rank has 4 queries of each, and the other 1 key
        (Branch(10), layout_of_segments(6, 10, 9, 1)),  # 9 queries, of which MIN_ROWS holds one time, and 7 more
        (Branch(6, 2), layout_of_segments(10, 6, 2, 4)),
        (Branch(None, 1, 0, range(0, 2)), layout_of_segments(12, 5, 1, 4)),  # two of three key/value heads
        (Branch(6), layout_of_segments(10, 6, 2, 2, 2)),  # folded over segments, and joined from two ranks
        # 6 query rows see the 15th key, the first 2 of them behind 14 that do not. Cut at 16, and folded over segments,
        # the 2 and the 4 are too many for one call, but not each.
        (Branch(21), Layout.from_cuts(sorted(range(168), key=lambda x: (x % 21 == 14, x)), (0, 160, 168))),
    ),
)
def test_no_call_takes_more_than_the_bucket(branch: Branch, layout: Layout, causal: bool, exchange: str) -> None:
    for bucket in range(1, 61):
        setting = setting_of(Pattern((branch,), causal), layout, exchange, bucket, (3, 3))
        check_calls(setting)
        check_calls(replace(setting, own=bucket + 40))
    for bucket in (1, 7, 20):
        check(setting_of(Pattern((branch,), causal), layout, exchange, bucket, (3, 3)))


def test_own_segments_fold_into_larger_calls() -> None:
    """16 segments of 8 on each of two ranks, and one across all: a bucket of 16 has two segments in a call."""
    pattern, layout = Pattern((Branch(8), Branch(None)), causal=True), Layout.contiguous(256, 2)
    for own, folds in ((None, [2] * 8), (16, [2] * 8), (64, [8, 8]), (70, [8, 8]), (1000, [16])):
        plan = plan_of(pattern, layout, 1, 1, 1, DIRECT, 16, own)
        found = [tile for tile in plan.local if tile.query_rows.length == 8]
        assert [tile.query_rows.folds for tile in found] == [tile.key_rows.folds for tile in found] == folds
        assert {tile.key_rows.length for tile in plan.local} == {8, 16}, "a single segment is cut by the bucket"


def test_own_keys_per_call_by_default() -> None:
    assert default_local_bucket(2, 32, 128, 40) == 40
    assert default_local_bucket(2, 32, 128, 2**20, "cuda") == 2**20
    for widest in (128, 256):
        assert default_local_bucket(2, 32, widest, 40, "cuda") == 2**31 // (2 * 32 * widest)


def test_slots_are_counted_in_64_bits() -> None:
    plan = plan_of(Pattern.dense(), Layout.zigzag(2**33, 4), 1, 2, 2, RING, 2**33)
    gathers = [gather for step in plan.steps for gather in step.gathers]
    assert [gather.slots.start for gather in gathers] == [0, 2**31], "two chunks of 2^30 tokens, two heads"


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(stretched_settings())
def test_plans_scale_with_the_sequence(setting: PlanSetting) -> None:
    check(setting)


@settings(max_examples=80)
@given(st.data())
def test_plans_of_long_sequences_match_closed_forms(data: st.DataObject) -> None:
    """One branch over equal shards of any size, causal or not: pairs, and slots that are sent."""
    p, order = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(("contiguous", "zigzag", "striped")))
    causal, exchange = data.draw(st.booleans()), data.draw(st.sampled_from([*KEY_EXCHANGES]))
    heads, kv_heads = data.draw(st.sampled_from(((1, 1), (4, 2), (3, 3))))
    n = 16 * p * data.draw(st.integers(1, 2**36 // p))
    piece, branch = n // p, Branch(n)
    if order == "zigzag":
        piece //= 2
    elif order == "contiguous":
        rate = data.draw(st.sampled_from((1, 2, 4, 8)))
        shards = data.draw(st.sampled_from([m for m in range(1, p + 1) if p % m == 0]))
        first, apart = data.draw(st.integers(0, rate - 1)), data.draw(st.booleans()) and heads == kv_heads
        offsets = tuple((first + head * apart) % rate for head in range(heads))
        branch, piece = Branch(shards * piece, rate, offsets), piece // rate
    pattern, layout = Pattern((branch,), causal), getattr(Layout, order)(n, p)
    plans = setting_of(pattern, layout, exchange, piece, (heads, kv_heads)).plans
    length, rate = branch.segment_length or n, branch.dilation_rate
    pairs = sum(pairs_of(tile) for plan in plans for tile in tiles_of(plan))
    assert pairs == closed_forms.segment_pairs(n, length, rate, heads, causal)
    if exchange == "gather" or (length, rate) == (n, 1):
        slots = closed_forms.dense_slots(n, p, kv_heads, causal, order, exchange)
    else:
        slots = closed_forms.segment_slots(n, p, length, rate, kv_heads, causal, exchange)
    for direction in ("sends", "return_sends", "receives", "return_receives"):
        found = [transfer for plan in plans for step in plan.steps for transfer in getattr(step, direction)]
        assert sum(transfer.stop - transfer.start for transfer in found) == slots
    for plan in plans:
        assert all(0 <= one.slots.start < plan.sizes.send for step in plan.steps for one in step.gathers)
        assert all(0 <= tile.key_rows.start < plan.sizes.receive for step in plan.steps for tile in step.tiles)


def pairs_of(tile: Tile) -> int:
    heads = tile.query_heads.groups * tile.query_heads.per_group
    rows, keys = tile.query_rows.length, tile.key_rows.length
    if tile.mask is Mask.POSITION:
        assert tile.query_positions is not None and tile.key_positions is not None
        return heads * int((tile.key_positions[:, None, :] <= tile.query_positions[:, :, None]).sum())
    return heads * tile.query_rows.folds * (rows * (rows + 1) // 2 if tile.mask is Mask.CAUSAL else rows * keys)


# LongNet's published setting: arXiv 2307.02486, section 4.1.
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)


def tiles_of(plan: Plan) -> list[Tile]:
    return [*plan.local, *(tile for step in plan.steps for tile in step.tiles)]


def tile_count(n: int, order: str, causal: bool, exchange: str) -> tuple[int, int]:
    """Tiles and packs of the busiest rank."""
    pattern = Pattern.longnet(LENGTHS, RATES, 12, causal)
    plans = [
        plan_of(pattern, getattr(Layout, order)(n, 8), rank, 12, 12, KEY_EXCHANGES[exchange], n) for rank in (0, 3, 7)
    ]
    packs = (sum(len(step.gathers) + len(step.scatters) for step in plan.steps) for plan in plans)
    return max(len(tiles_of(plan)) for plan in plans), max(packs)


@pytest.mark.parametrize("exchange", ("ring", "direct"))
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped"))
@pytest.mark.parametrize("causal", (False, True))
def test_tiles_do_not_grow_with_the_sequence(order: str, causal: bool, exchange: str) -> None:
    """A tile for each of the segments would be 1984 of them, and 1984 * 8 with the ranks that share them."""
    found = tile_count(2**20, order, causal, exchange)
    assert tile_count(2**19, order, causal, exchange) == found
    # 12 heads use every offset of every rate. Rates 1 and 2 have a call for each offset; of rate 4, the three heads of
    # an offset go each with the next three heads. Of 6 and 12, which divide no segment, offsets have longer grids or
    # shorter ones: of 6, two runs of four heads and two of two, of 12, a run of eight and one of four.
    assert found == (1 + 2 + 3 + (2 + 2) + 2, 0) if order == "contiguous" else found[0] < 1000


@pytest.mark.parametrize(("exchange", "calls"), (("ring", 3), ("direct", 1)))
def test_larger_buckets_mean_fewer_steps(exchange: str, calls: int) -> None:
    layout = Layout.contiguous(64, 4)
    plans = [setting_of(Pattern.dense(), layout, exchange, bucket, (2, 2)).plans[0] for bucket in (1, 4, 16, 64)]
    steps = [len(plan.steps) for plan in plans]
    assert steps == sorted(steps, reverse=True) and (steps[0], steps[-1]) == (16 * 3, calls)
    alone = setting_of(Pattern.longnet((4, 8), (1, 2), 2), layout, exchange, 4, (2, 2))
    assert all(plan.steps == () for plan in alone.plans), "segments within a rank send nothing"


def test_zigzag_shards_meet_in_one_call_each() -> None:
    for rate in (1, 2):
        for plan in setting_of(Pattern((Branch(None, rate),), True), Layout.zigzag(48, 3), "ring", 48, (1, 1)).plans:
            (tile,) = plan.local
            assert tile.mask is Mask.CAUSAL and tile.query_rows.length == tile.key_rows.length == 16 // rate
    for exchange in KEY_EXCHANGES:
        for plan in setting_of(Pattern.dense(), Layout.zigzag(64, 2), exchange, 32, (1, 1)).plans:
            (step,) = plan.steps
            (tile,) = step.tiles
            assert tile.query_rows.length == tile.key_rows.length == 32


def test_slots_that_one_tile_reads_are_written_once() -> None:
    """Gradients of slots are summed only if a bucket cuts the query rows, or the exchange relays."""
    layout = Layout.zigzag(256, 4)
    for pattern in (Pattern.dense(True), Pattern.longnet((128, 256), (1, 4), 4, causal=True)):
        for bucket, exchange, once in ((256, "direct", True), (8, "direct", False), (256, "ring", False)):
            plans = setting_of(pattern, layout, exchange, bucket, (4, 2)).plans
            assert all(step.once for plan in plans for step in plan.steps) == once
