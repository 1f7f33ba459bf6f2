"""Times of kernels by the table of `scripts/bench kernels`, and the copies and merges beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bench.workload import document_lengths

from reference.pattern import Pattern
from ring.compute.gpu.kernel_times import FILE
from ring.compute.kernels import CUDNN, FA4, FLASH
from ring.estimate import Kernels, Rates, estimate, rank_work, timeline
from ring.estimate.estimates import EstimatedCall
from ring.estimate.tile_seconds import GPU, call_seconds, tile_seconds
from ring.layout import Layout
from ring.plan.blocks import Heads
from ring.plan.exchanges import DIRECT, DIRECT_KEPT, RING
from ring.plan.plan import plan_of
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile

RECORD = json.loads(FILE.read_text())
SIZES: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
NAMES = ("passed", "dim", "value_dim", "causal", "varied", "window")
MEASURED = Rates.of(GPU)


def rows_of(passed: str, dim: int, causal: bool, varied: bool) -> list[dict[str, Any]]:
    kind = (passed, dim, dim, causal, varied, 0)
    return [row for row in RECORD["rows"] if tuple(row[name] for name in NAMES) == kind]


def test_the_table_is_of_the_gpu_that_rates_are_of() -> None:
    assert RECORD["device"] == GPU


@pytest.mark.parametrize("passed", ("forward", "backward"))
@pytest.mark.parametrize("causal", (True, False))
def test_calls_of_the_table_take_its_times_plus_throttling(passed: str, causal: bool) -> None:
    for row in rows_of(passed, 128, causal, False):
        seconds = call_seconds(np.array([row["length"] ** 2]), row["heads"], causal, passed, (128, 128))
        ratio = seconds / (1e-3 * min(row["ms"].values()))
        assert 0.95 < ratio < 1.2  # of the calls on many heads the longest were throttled already
        if row["length"] == 2**15:
            assert ratio == pytest.approx(1)


@pytest.mark.parametrize("passed", ("forward", "backward"))
def test_varlen_calls_take_the_time_of_their_sequences(passed: str) -> None:
    """Each as one of many of its length, which the table times in other calls: within 20 % of its times."""
    for mean, row in zip((128, 512, 2048, 8192), rows_of(passed, 128, True, True), strict=True):
        lengths = np.array(document_lengths(2**15, mean))
        rows = Rows(0, 1, 2**15)
        tile = Tile(
            rows, rows, Heads(8, 4, 0, 4, 1), Heads(8, 1, 0, 1, 1), Mask.CAUSAL,
            sequences=Sequences.of(lengths, lengths),
        )  # fmt: skip
        seconds = tile_seconds(tile, passed, (128, 128), 1, (FA4,))
        assert 0.8 < seconds / (1e-3 * row["ms"]["fa4"]) < 1.2


def test_fewer_kernels_and_other_head_dims() -> None:
    areas = np.array([4096**2])
    times = [
        call_seconds(areas, 32, False, "forward", dims, kernels)
        for dims, kernels in (((128, 128), (FA4,)), ((128, 128), (FLASH,)), ((96, 96), (FA4,)))
    ]
    assert times[1] > 1.5 * times[0] and 0.6 < times[2] / times[0] < 1.1


def test_copies_merges_and_starts_by_hand() -> None:
    """Two shards of 4 rows in zigzag order, 1 head of 1 number of 2 bytes. Rank 1 has the rows 2 to 5: a tile of its
    own and one of all its rows with rows 0 and 1. It packs the rows 2 to 5, which rank 0's last two see.
    """
    layout = Layout.zigzag(8, 2)
    call = EstimatedCall(Pattern.dense(True), 1, 1, 1, 1, 1, torch.bfloat16, "direct", 8, "cuda")
    problem = call.problem(layout, layout)
    plan = plan_of(call.pattern, layout, 1, 1, 1, DIRECT, 8)
    slot = 4
    assert rank_work._starts(plan, False) == (2 + 1 + 1, 2 + 1 + 2 + 2)
    assert rank_work._starts(plan, True) == (2 + 1 + 1, 2 + 1 + 2)  # both gradients of the other tile are in place
    assert rank_work._packed(plan, problem, True, False) == (4 * slot, 4 * slot + 2 * slot)
    assert rank_work._packed(plan, problem, True, True) == (4 * slot, 4 * slot)
    added = replace(plan, steps=tuple(replace(step, once=False) for step in plan.steps))
    assert rank_work._starts(added, True) == rank_work._starts(added, False)
    assert rank_work._packed(added, problem, True, True) == rank_work._packed(added, problem, True, False)
    kept = plan_of(call.pattern, layout, 1, 1, 1, DIRECT_KEPT, 8)
    assert rank_work._packed(kept, problem, True, False) == (4 * slot, 2 * slot)  # keys are packed once
    assert MEASURED.kernels is not None
    fa4, cudnn = (replace(MEASURED, kernels=replace(MEASURED.kernels, names=(name,))) for name in ("fa4", "cudnn"))
    how: dict[str, Any] = {"bucket": 8, "by_default": False, "narrow": True, "strict": True}
    in_place, copied = (rank_work.rank_work(problem, DIRECT, rates=rates, **how).besides[1] for rates in (fa4, cudnn))
    assert in_place < copied
    out = 4 * 2 + 2 * 4 * 2  # the other tile is read, and the own one, which is everything, read and written
    keys = 4 * slot + 2 * 4 * slot  # four returned gradients
    for in_place in (False, True):
        assert rank_work._merged(plan, problem, True, in_place) == (out, out + keys)
    assert rank_work._rows_merged([(Rows(0, 1, 2), Heads(1, 1, 0, 1, 1)), (Rows(2, 1, 2), Heads(1, 1, 0, 1, 1))], 4, 1,
                                  True) == 0  # fmt: skip


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all", "all-to-all:2+ring"))
def test_every_part_takes_time(exchange: str) -> None:
    def seconds(rates: Rates) -> np.ndarray:
        (row,) = estimate(Pattern.dense(True), tokens=2**14, ranks=4, exchange=exchange, rates=rates, **SIZES)
        return np.array([row.forward.seconds, row.backward.seconds])

    kernels, whole = MEASURED.kernels, seconds(MEASURED)
    assert kernels is not None
    without = [
        replace(MEASURED, packing=None),
        replace(MEASURED, kernels=replace(kernels, launch=0.0)),
        replace(MEASURED, latency=0.0),
    ]
    if exchange != "all-to-all":  # a block of heads in one kernel call: nothing to merge
        without.append(replace(MEASURED, kernels=replace(kernels, merging=None)))
    assert all((seconds(rates) <= whole).all() and (seconds(rates) < whole).any() for rates in without)
    assert (seconds(replace(MEASURED, kernels=replace(kernels, names=("flash",)))) > 1.2 * whole).all()


def test_many_runs_take_the_time_of_large_calls() -> None:
    """No plan is made of 32 joined shards in zigzag order: it would have many tiles."""
    rows = [
        estimate(Pattern.dense(True), tokens=2**17, ranks=p, exchange="all-to-all", order="zigzag", rates=MEASURED,
                 heads=64, head_dim=128)[0].forward.computing
        for p in (16, 32)
    ]  # fmt: skip
    assert rows[0] is not None and rows[1] is not None and 0.3 < rows[1] / rows[0] < 0.7


def test_plans_have_windows_that_kernels_of_their_head_dims_take() -> None:
    """FlashAttention-4 does not take head dims of 80, and FlashAttention-2 no window of 4096 tokens."""
    pattern, layout = Pattern.dense(True, window=4095), Layout.contiguous(2**15, 2)
    for head_dim, windows in ((80, {None}), (128, {None, 4095})):
        call = EstimatedCall(pattern, 32, 8, head_dim, head_dim, 1, torch.bfloat16, "ring", None, "cuda")
        plan = rank_work.rank_plan(call.problem(layout, layout), RING, 2**16, True, Kernels(), 1)
        assert {tile.window for tile in plan.tiles} == windows


@pytest.mark.parametrize("passed", ("forward", "backward"))
def test_cudnn_prices_no_window(passed: str) -> None:
    for length in (512, 2**12, 2**15):
        rows = Rows(0, 1, length)
        tile = Tile(rows, rows, Heads(8, 4, 0, 4, 1), Heads(8, 1, 0, 1, 1), Mask.CAUSAL, window=511)
        several, alone = (tile_seconds(tile, passed, (128, 128), 1, x) for x in ((CUDNN, FLASH), (FLASH,)))
        assert several == alone


def test_timelines_have_the_kernels_of_a_gpu() -> None:
    layout = Layout.zigzag(2**14, 4)
    (row,) = estimate(Pattern.dense(True), layout, exchange="ring", rates=MEASURED, **SIZES)
    assert row.forward.seconds is not None
    svg = timeline(Pattern.dense(True), layout, exchange="ring", rates=MEASURED, **SIZES).svg
    assert f"predicted: {1e3 * row.forward.seconds:.4g} ms" in svg


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"forward": 1.0}, "forward is 1.0; it must be None with kernels"),
        ({"stage": 1.0}, "stage is 1.0; it must be 0.0 with kernels"),
        ({"kernels": None}, "forward is None"),
        ({"kernels": 3}, "kernels is 3; it must be Kernels\\(\\) or None"),
    ],
)
def test_refuses(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(MEASURED, **change)


def test_refuses_unknown_kernels() -> None:
    for names in ((), ("fa5",), ["fa4"]):
        with pytest.raises(ValueError, match="names is .*; it must be a tuple of some of 'cudnn', 'flash', 'fa4'"):
            Kernels(names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch is -1"):
        Kernels(launch=-1)
    with pytest.raises(ValueError, match="merging is 0"):
        Kernels(merging=0)


def _windowed(window: int | None, lengths: tuple[int, ...], causal: bool = True) -> float:
    """Seconds of a tile of sequences."""
    sequences = Sequences.of(np.array(lengths), np.array(lengths))
    rows, heads = Rows(0, 1, sum(lengths)), Heads(8, 4, 0, 4, 1)
    mask = Mask.CAUSAL if causal else Mask.FULL
    tile = Tile(rows, rows, heads, heads._replace(per_group=1), mask, sequences=sequences, window=window)
    return tile_seconds(tile, "forward", (128, 128), 1)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_takes_no_longer_than_none_and_sequences_add_up(causal: bool) -> None:
    for window in (255, 1023, 4095, 8190):
        assert _windowed(window, (8192,), causal) <= _windowed(None, (8192,), causal)
        few, many = (_windowed(window, (4096,) * count, causal) for count in (8, 32))
        assert 3 < many / few < 4.1
    assert _windowed(255, (8192,), causal) < _windowed(None, (8192,), causal) / 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float32; it must be one of torch.bfloat16, torch.float16 with"),
        ({"device": "cpu"}, "device is 'cpu'; it must be 'cuda' with measured kernels: give Rates\\(forward=,"),
        ({"head_dim": 7}, "head_dim and value_dim are \\(7, 7\\); cudnn or flash or fa4 must take them with"),
        (
            {"order": "hilbert"},
            "rates have no time of masks by position, .* give Rates\\(forward=, backward=, link=\\)",
        ),
    ],
)
def test_refuses_calls_that_no_measured_kernel_takes(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"tokens": 512, "ranks": 2, "heads": 4, "head_dim": 64, "exchange": "direct"} | change
    with pytest.raises(ValueError, match=said):
        estimate(Pattern.dense(causal=True), rates=Rates.of("NVIDIA H200"), **given)


def test_a_listed_layout_takes_the_time_of_its_calls() -> None:
    hilbert, zigzag = (
        estimate(
            Pattern.dense(), tokens=2**13, ranks=4, order=order, exchange="direct", heads=32, kv_heads=8, head_dim=128,
            rates=Rates.of("NVIDIA H200"),
        )[0].forward.seconds
        for order in ("hilbert", "zigzag")
    )  # fmt: skip
    assert hilbert is not None and zigzag is not None and abs(hilbert / zigzag - 1) < 0.1


def test_rates_of_other_gpus_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"gpu is 'NVIDIA H100'; .* for others give Rates\(forward=, backward=, link=\)"
    ):
        Rates.of("NVIDIA H100")
    with pytest.raises(
        ValueError, match=r"kernels is \('fa5',\); it must be a tuple of some of 'cudnn', 'flash', 'fa4'"
    ):
        Rates.of("NVIDIA H200", kernels=("fa5",))
