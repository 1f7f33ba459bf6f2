"""The plan without a tensor of data: all ranks' plans are walked with labels in place of keys, values and gradients.

Nothing here shares code with the plan: the pairs that the tiles compute are counted against the pattern's own
multiplicity, what travels against a dense look at who needs whom, and gradients are random numbers whose sums
(mod 2^64) must come back to the owner.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from reference.pattern import Branch, Pattern, multiplicity
from ring.budget import default_own
from ring.layout import Layout
from ring.plan.blocks import blocks_of
from ring.plan.plan import EXCHANGES, plan_of
from ring.plan.tile import Mask
from ring.plan.tiling import LEAST_ROWS
from tests.support.plan_settings import drawn_settings, listed, rank_of_position
from verification.run.plan_walk import Array, PlanSetting, PlanWalk

# --- a dense look at the same ---


def dense_multiplicity(setting: PlanSetting) -> Array:
    at = torch.arange(setting.layout.n)
    return multiplicity(setting.pattern, at, at, setting.heads).numpy()


def needs_by_block(setting: PlanSetting) -> list[tuple[int, Array]]:
    """(width, needed): needed[dst, key position], for every branch and offset. The own keys count too."""
    n, p = setting.layout.n, setting.p
    at, rank_of = torch.arange(n), rank_of_position(setting.layout)
    found = []
    for branch in setting.pattern.branches:
        offsets = branch.offsets(setting.heads)
        for offset in {o for o in offsets if o is not None}:
            kv = {h // (setting.heads // setting.kv_heads) for h, o in enumerate(offsets) if o == offset}
            grid = replace(branch, offset=offset, heads=None)
            alone = replace(setting.pattern, branches=(grid,))
            seen = multiplicity(alone, at, at, 1)[0].numpy() > 0  # (query, key)
            needed = np.stack([seen[rank_of == dst].any(0) for dst in range(p)])
            found.append((len(kv), needed))
    return found


def expected_sent(setting: PlanSetting) -> list[int]:
    """Slots that each rank has to send forward: the least that the exchange can do with."""
    p, sent, owner = setting.p, [0] * setting.p, rank_of_position(setting.layout)
    if setting.exchange == "gather":
        return [count * setting.kv_heads * (p - 1) for count in setting.layout.counts]
    for width, needed in needs_by_block(setting):
        for key in range(setting.layout.n):
            source = int(owner[key])
            distances = [(int(dst) - source) % p for dst in np.flatnonzero(needed[:, key]) if dst != source]
            if setting.exchange == "direct":
                sent[source] += width * len(distances)
            else:
                for hop in range(max(distances, default=0)):
                    sent[(source + hop) % p] += width
    return sent


# --- what holds for every plan ---


def check(setting: PlanSetting) -> None:
    walk = PlanWalk(setting).go()
    assert (walk.pairs == dense_multiplicity(setting)).all(), "pairs differ from the pattern's multiplicity"
    assert (walk.got == walk.due).all(), "a gradient is lost, doubled or sent to another row"
    assert walk.sent == expected_sent(setting)
    check_nothing_in_vain(setting, walk)
    check_sizes(setting)


def check_nothing_in_vain(setting: PlanSetting, walk: PlanWalk) -> None:
    received = [0] * setting.p
    for identity, ranks in walk.received_on.items():
        assert len(set(ranks)) == len(ranks) and walk.owner[identity] not in ranks, "a slot is sent to where it was"
        for rank in ranks:
            received[rank] += 1
        if setting.exchange == "direct":
            assert walk.read_by[identity] == set(ranks), "a slot is sent to a rank that does not read it"
        if setting.exchange == "ring":
            assert ranks[-1] in walk.read_by[identity], "a slot travels beyond the last rank that reads it"
            hops = [(rank - walk.owner[identity]) % setting.p for rank in ranks]
            assert hops == list(range(1, len(ranks) + 1)), "a slot leaves the ring's order"
    assert set(walk.received_on) == set(range(len(walk.owner))), "packed, but not sent"
    assert walk.returned == received, "every received slot sends its gradient on once"


def check_sizes(setting: PlanSetting) -> None:
    if setting.exchange == "gather":
        return
    widths = [block.width for block in blocks_of(setting.pattern, setting.layout.n, setting.heads, setting.kv_heads)]
    most = setting.bucket * setting.kv_heads + max(widths) - 1
    for plan in setting.plans:
        assert plan.sizes.receive <= most and plan.sizes.send <= most
        assert plan.sizes.returned <= 2 * most


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_settings())
@example(PlanSetting(Pattern.dense(), Layout.contiguous(0, 3), 2, 1, "ring", 4))
# A distance that is cut is a round by itself, whatever room the one before left.
@example(PlanSetting(Pattern((Branch(8, 1),)), Layout.from_cuts([0, 1, 2, 3, 8, 9, 4, 5, 6, 7], (0, 5, 6, 10, 10)),
                 1, 1, "direct", 2))  # fmt: skip
# Two branches whose heads read the same keys: gathered, listed, and of grids that meet in every other segment.
@example(PlanSetting(Pattern((Branch(None, 1, 0, range(0, 1)), Branch(None, 1, 0, range(1, 2)))),
                 Layout.contiguous(8, 2), 2, 1, "gather", 1000))  # fmt: skip
@example(PlanSetting(Pattern((Branch(8, 2, 0, range(0, 1)), Branch(4, 1, 0, range(1, 2)))),
                 Layout.from_cuts([0, 4, 6, 7, 1, 3, 8, 9, 10, 11, 2, 5, 12, 13, 14, 15], (0, 16)),
                 4, 2, "ring", 4))  # fmt: skip
@example(PlanSetting(Pattern((Branch(4, 2, (0, 1), range(0, 2)), Branch(6, 2, 0, range(2, 3)))),
                 Layout.from_cuts(list(range(10)), (0, 4, 10)), 3, 1, "ring", 1000))  # fmt: skip
# A diagonal that begins at the third key of a message, whose keys take two slots each.
@example(PlanSetting(Pattern.dense(True), Layout.from_cuts([*range(0, 12, 2), *range(1, 12, 2)], (0, 8, 12)),
                 2, 2, "ring", 1000))  # fmt: skip
@example(PlanSetting(Pattern.dense(True), Layout.zigzag(12, 3), 2, 1, "ring", 2))
@example(PlanSetting(Pattern.longnet((4, 8), (1, 2), 4, True), Layout.striped(24, 4), 4, 2, "direct", 3))
def test_a_plan_computes_sends_and_returns_exactly_what_the_pattern_says(setting: PlanSetting) -> None:
    check(setting)


@pytest.mark.parametrize("bucket", (2, 1000))
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("pattern", (Pattern.dense(True), Pattern.longnet((6, None), (1, 2), 2, True)))
@pytest.mark.parametrize(
    "runs",
    (
        (range(0, 20, 2), range(1, 20, 2)),  # a rank with two runs that see prefixes of one range, of unequal length
        (range(1, 20, 2), range(0, 20, 2)),
        (range(0, 8), range(8, 20, 3), range(9, 20, 3), range(10, 20, 3)),  # steps 1 and 3
        (range(12, 20), range(0, 12, 3), range(1, 12, 3), range(2, 12, 3)),
        (range(0, 20, 4), range(1, 20, 2), range(2, 20, 4)),  # steps 4 and 2, interleaved
        (range(1, 20, 2), range(0, 20, 4), range(2, 20, 4)),
        (range(0, 12, 3), range(12, 20, 2), range(1, 12, 3), range(13, 20, 2), range(2, 12, 3)),
    ),
)
def test_interleaved_runs(runs: tuple[range, ...], pattern: Pattern, exchange: str, bucket: int) -> None:
    order = [position for run in runs for position in run]
    for cuts in ((0, 7, 12, 20), (0, 3, 3, 20), (0, 10, 16, 20)):
        layout = Layout.from_cuts(order, cuts)
        assert layout.runs is not None
        check(PlanSetting(pattern, layout, 2, 1, exchange, bucket))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
def test_segments_that_look_alike_but_for_the_step_of_their_keys(causal: bool, exchange: str) -> None:
    """Two segments with equally many queries and keys; keys are two rows apart in the one, one row in the other."""
    order = [0, 1, 2, 3, 8, 10, 4, 5, 6, 7, 12, 13, 14, 15, 9, 11]
    layout = Layout.from_cuts(order, (0, 6, 16, 16))
    assert layout.runs is not None
    check(PlanSetting(Pattern((Branch(8, 2),), causal), layout, 2, 1, exchange, 1000))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("order", ("contiguous", "zigzag", "striped", "hilbert"))
def test_sixteen_ranks(order: str, causal: bool, exchange: str) -> None:
    layout = getattr(Layout, order)(50, 16)
    pattern = Pattern((Branch(24, 2, (0, 1, 1, 0)), Branch(7, 3, 2, range(1, 3)), Branch(None, 4)), causal)
    check(PlanSetting(pattern, layout, 4, 2, exchange, 2))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_numpy_has_nothing_to_warn_of(exchange: str) -> None:
    """A warning would be the user's to see."""
    for n, pattern in ((0, Pattern.dense()), (24, Pattern.longnet((8, 24), (1, 3), 2, True))):
        with np.errstate(all="raise"):
            assert len(PlanSetting(pattern, Layout.zigzag(n, 3), 2, 1, exchange, 5).plans) == 3


@settings(max_examples=60, deadline=None)
@given(drawn_settings())
def test_runs_and_listing_plan_the_same_pairs(setting: PlanSetting) -> None:
    if setting.layout.n:
        same = PlanSetting(
            setting.pattern, listed(setting.layout), setting.heads, setting.kv_heads, setting.exchange, setting.bucket
        )
        check(same)
        if setting.layout.runs is not None:
            assert PlanWalk(same).go().sent == PlanWalk(setting).go().sent


def check_calls(setting: PlanSetting) -> None:
    """No kernel call takes more key tokens than the bucket, or more query rows, or LEAST_ROWS, than that."""
    for plan in setting.plans:
        for tile in [*plan.local, *(tile for step in plan.steps for tile in step.tiles)]:
            assert tile.key_rows.folds * tile.key_rows.length <= setting.bucket
            assert tile.query_rows.folds * tile.query_rows.length <= max(setting.bucket, LEAST_ROWS)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("branch", "keys_of_each"),
    (
        (Branch(5), 1),  # 12 segments, of which a rank has 4 queries each and the other 1 key each
        (Branch(5), 4),
        (Branch(10), 1),  # 9 queries, of which LEAST_ROWS holds one time, and 7 more
        (Branch(6, 2), 2),
        (Branch(None, 1, 0, range(0, 2)), 1),  # two of three key/value heads: more rows in a message than the bucket
    ),
)
def test_no_call_takes_more_than_the_bucket(branch: Branch, keys_of_each: int, causal: bool, exchange: str) -> None:
    n = 60
    length = branch.segment_length or 5
    order = sorted(range(n), key=lambda x: (x % length < keys_of_each, x))
    late = sum(x % length < keys_of_each for x in range(n))
    layout = Layout.from_cuts(order, (0, n - late, n))
    for bucket in range(1, n + 1):
        check_calls(PlanSetting(Pattern((branch,), causal), layout, 3, 3, exchange, bucket))
    for bucket in (1, 7, 20):
        check(PlanSetting(Pattern((branch,), causal), layout, 3, 3, exchange, bucket))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("bucket", range(1, 61))
def test_keys_of_two_ranks_in_one_call_are_no_more_than_the_bucket(bucket: int, exchange: str) -> None:
    """10 segments of 6, of each of which three ranks hold two: folded over segments, and joined from two ranks."""
    order = sorted(range(60), key=lambda x: (x % 6 // 2, x))
    check_calls(PlanSetting(Pattern((Branch(6),)), Layout.from_cuts(order, (0, 20, 40, 60)), 1, 1, exchange, bucket))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("bucket", range(1, 17))
def test_query_rows_that_see_the_same_keys_in_one_call_are_no_more_than_the_bucket(bucket: int, exchange: str) -> None:
    """8 segments of 21, of which another rank holds the 15th key: 6 query rows see it, the first 2 of them behind 14
    that do not. Cut at 16, and folded over segments, the 2 and the 4 are too many for one call, but not each."""
    order = sorted(range(168), key=lambda x: (x % 21 == 14, x))
    layout = Layout.from_cuts(order, (0, 160, 168))
    check_calls(PlanSetting(Pattern((Branch(21),), True), layout, 1, 1, exchange, bucket))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_settings())
def test_no_call_takes_more_than_any_bucket(setting: PlanSetting) -> None:
    for bucket in range(1, setting.layout.n + 1):
        check_calls(replace(setting, bucket=bucket))


@pytest.mark.parametrize("bucket", range(1, 10))
def test_a_message_of_one_row_behind_one_beyond_the_cap(bucket: int) -> None:
    """One rank to the next: up to 9 rows, in chunks; to the one after that, the one token of rank 0."""
    layout = Layout.from_cuts(range(20), (0, 1, 10, 20))
    check(PlanSetting(Pattern.dense(True), layout, 1, 1, "direct", bucket))


def test_every_kind_of_mask_and_address_occurs() -> None:
    """The settings above reach the cases that the plan tells apart: none of the branches in the code is untested."""
    masks, listed_rows, folded, relayed, carried = set(), False, False, False, False
    for layout in (Layout.contiguous(24, 2), Layout.zigzag(24, 3), Layout.striped(24, 3), Layout.hilbert(24, 3)):
        setting = PlanSetting(Pattern.longnet((8, 24), (1, 3), 2, True), layout, 2, 1, "ring", 8)
        for plan in setting.plans:
            tiles = [*plan.local, *(tile for step in plan.steps for tile in step.tiles)]
            masks |= {tile.mask for tile in tiles}
            listed_rows |= any(tile.query_rows.index is not None for tile in tiles)
            folded |= any(tile.query_rows.folds > 1 for tile in tiles)
            relayed |= any(step.relayed and step.sends for step in plan.steps)
            carried |= any(step.carried for step in plan.steps)
    assert masks == set(Mask) and listed_rows and folded and relayed and carried


def test_more_bucket_means_fewer_steps_and_one_is_enough_without_a_cap() -> None:
    for exchange in ("ring", "direct"):
        steps = [
            len(PlanSetting(Pattern.dense(), Layout.contiguous(64, 4), 2, 2, exchange, bucket).plans[0].steps)
            for bucket in (1, 4, 16, 64)
        ]
        assert steps == sorted(steps, reverse=True) and steps[0] == 16 * 3
        assert steps[-1] == (3 if exchange == "ring" else 1)


def test_a_segment_within_a_rank_sends_nothing() -> None:
    for exchange in ("ring", "direct"):
        setting = PlanSetting(Pattern.longnet((4, 8), (1, 2), 2), Layout.contiguous(64, 4), 2, 2, exchange, 4)
        assert all(plan.steps == () and plan.sizes.receive == plan.sizes.send == 0 for plan in setting.plans)


# --- how plans grow ---

# LongNet's published setting: arXiv 2307.02486, section 4.1.
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)


def tile_count(n: int, order: str, causal: bool, exchange: str) -> tuple[int, int, int]:
    """Tiles of the busiest rank, of its own keys and in all, and packs."""
    pattern = Pattern.longnet(LENGTHS, RATES, 12, causal)
    plans = [plan_of(pattern, getattr(Layout, order)(n, 8), rank, 12, 12, exchange, n) for rank in (0, 3, 7)]
    return (
        max(len(plan.local) for plan in plans),
        max(len(plan.local) + sum(len(step.tiles) for step in plan.steps) for plan in plans),
        max(sum(len(step.gathers) + len(step.scatters) for step in plan.steps) for plan in plans),
    )


@pytest.mark.parametrize("causal", (False, True))
def test_segments_of_a_rank_are_one_tile_however_many(causal: bool) -> None:
    # 12 heads use every offset of every rate. Rates 1 and 2 have a call for each offset; of rate 4, the three heads of
    # an offset go each with the next three heads. Of 6 and 12, which divide no segment, offsets have longer grids or
    # shorter ones: of 6, two runs of four heads and two of two, of 12, a run of eight and one of four.
    calls = 1 + 2 + 3 + (2 + 2) + 2
    for n in (2**19, 2**20):
        assert tile_count(n, "contiguous", causal, "ring") == (calls, calls, 0)


def test_a_head_of_every_offset_is_one_call() -> None:
    pattern = Pattern((Branch(64, 8, tuple(range(8))),), causal=True)
    for layout, exchange in ((Layout.contiguous(256, 2), "ring"), (Layout.contiguous(64, 4), "direct")):
        for rank in range(layout.world_size):
            plan = plan_of(pattern, layout, rank, 8, 8, exchange, 256)
            assert [tile.query_heads.groups for tile in plan.local] == [8]
            received = [tile for step in plan.steps for tile in step.tiles]
            assert [tile.query_heads.groups for tile in received] == [8] * len(received)
            assert len(received) == (rank > 0 and exchange == "direct")


def test_segments_of_own_keys_fold_into_larger_calls_than_those_received() -> None:
    """16 segments of 8 on each of two ranks, and one across all: a bucket of 16 has two segments in a call."""
    pattern, layout = Pattern((Branch(8), Branch(None)), causal=True), Layout.contiguous(256, 2)
    for own, folds in ((None, [2] * 8), (16, [2] * 8), (64, [8, 8]), (70, [8, 8]), (1000, [16])):
        plan = plan_of(pattern, layout, 1, 1, 1, "direct", 16, own)
        found = [tile for tile in plan.local if tile.query_rows.length == 8]
        assert [tile.query_rows.folds for tile in found] == [tile.key_rows.folds for tile in found] == folds
        assert {tile.key_rows.length for tile in plan.local} == {8, 16}, "a single segment is cut by the bucket"
        assert all(tile.key_rows.folds * tile.key_rows.length <= 16 for step in plan.steps for tile in step.tiles)


def test_own_keys_per_call_by_default() -> None:
    q = torch.empty(2, 3, 32, 128)
    assert default_own(q, 40) == 40
    on_gpu: Any = SimpleNamespace(shape=q.shape, is_cuda=True)
    assert default_own(on_gpu, 40) == 2**30 // (2 * 32 * 128) and default_own(on_gpu, 2**20) == 2**20


@pytest.mark.parametrize("rate", (1, 2))
def test_a_zigzag_shard_meets_itself_in_one_causal_call(rate: int) -> None:
    for plan in PlanSetting(Pattern((Branch(None, rate),), True), Layout.zigzag(48, 3), 1, 1, "ring", 48).plans:
        (tile,) = plan.local
        assert tile.mask is Mask.CAUSAL and tile.query_rows.length == tile.key_rows.length == 16 // rate


@pytest.mark.parametrize("bucket", (32, 64))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_both_halves_of_a_zigzag_shard_read_the_keys_of_another_rank_in_one_call(exchange: str, bucket: int) -> None:
    for plan in PlanSetting(Pattern.dense(), Layout.zigzag(64, 2), 1, 1, exchange, bucket).plans:
        (step,) = plan.steps
        (tile,) = step.tiles
        assert tile.query_rows.length == tile.key_rows.length == 32


@pytest.mark.parametrize("exchange", ("ring", "direct"))
@pytest.mark.parametrize("order", ("zigzag", "striped"))
@pytest.mark.parametrize("causal", (False, True))
def test_tiles_do_not_grow_with_the_sequence(order: str, causal: bool, exchange: str) -> None:
    small, large = tile_count(2**19, order, causal, exchange), tile_count(2**20, order, causal, exchange)
    assert large == small
    # A tile for each of the segments would be 1984 of them, and 1984 * 8 with the ranks that share them.
    assert large[1] < 1000


def test_slots_that_one_tile_reads_are_written_once() -> None:
    """Where a bucket cuts the query rows, or the exchange relays, gradients of slots are summed."""
    layout = Layout.zigzag(256, 4)
    longnet = Pattern.longnet((128, 256), (1, 4), 4, causal=True)
    for pattern in (Pattern.dense(True), longnet):
        for bucket, exchange, once in ((256, "direct", True), (8, "direct", False), (256, "ring", False)):
            plans = PlanSetting(pattern, layout, 4, 2, exchange, bucket).plans
            assert all(step.once for plan in plans for step in plan.steps) == once
