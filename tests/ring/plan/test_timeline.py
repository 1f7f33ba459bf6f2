"""Pictures of plans: scores that are counted by hand, and bars that begin and end with the stages."""

from __future__ import annotations

import re

import numpy as np
import pytest

from reference import Pattern
from ring.layout import Layout
from ring.plan.exchange import key_exchange
from ring.plan.plan import plan_of
from ring.plan.timeline import seconds_picture, steps_picture

BAR = re.compile(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" [^>]*><title>([^<]*)</title>')


def bars(svg: str) -> list[tuple[float, float, str]]:
    return [(float(x), float(width), tip) for x, width, tip in BAR.findall(svg)]


@pytest.mark.parametrize("varlen", [0, 64])
@pytest.mark.parametrize("exchange", ["ring", "direct", "gather"])
@pytest.mark.parametrize(
    ("pattern", "scores"),
    [
        (Pattern.dense(), 64 * 64),
        (Pattern.dense(causal=True), 64 * 65 // 2),
        (Pattern.dense(causal=True, documents=(8, 32, 0, 24)), sum(n * (n + 1) // 2 for n in (8, 32, 24))),
        (Pattern.longnet([16, 64], [1, 4], 2), (4 * 16**2 + 16**2)),
    ],
)
def test_tiles_of_all_ranks_compute_the_visible_pairs(
    pattern: Pattern, scores: int, exchange: str, varlen: int
) -> None:
    """Contiguous shards, and documents that end at a rank's end or within it, need no mask by position."""
    total = 0
    for rank in range(4):
        plan = plan_of(pattern, Layout.contiguous(64, 4), rank, 2, 1, key_exchange(exchange), 64, varlen=varlen)
        total += sum(tile.scores for tiles in (plan.local, *(step.tiles for step in plan.steps)) for tile in tiles)
    assert total == 2 * scores


def test_a_plan_shows_its_steps() -> None:
    """Dense causal, contiguous: rank 2 of 3 with 8 tokens computes 36 of its own pairs, and 64 after each hop."""
    plan = plan_of(Pattern.dense(causal=True), Layout.contiguous(24, 3), 2, 1, 1, key_exchange("ring"), 8)
    svg = plan._repr_html_()
    assert [tip for _, _, tip in bars(svg)] == ["36 scores", "64 scores", "64 scores", "8 slots", "8 slots"]
    assert ">ring, forward: 2 steps; longest bar 64 scores; longest bar 8 slots<" in svg
    assert all(f">{name}<" in svg for name in ("rank 2", "own keys", "step 1", "step 2"))


def test_many_steps_share_columns() -> None:
    svg = steps_picture("title", "rank 0", [1] * 200, [2] * 200).svg
    assert [tip for *_, tip in bars(svg)] == ["4 scores"] * 50 + ["8 slots"] * 50 and ">step 20<" in svg


def test_stages_end_with_their_kernels_and_messages() -> None:
    computing, messages = np.array([[1.0, 2], [3, 1], [0, 0]]), np.array([[2.0, 1], [0, 4], [1, 2]])
    svg = seconds_picture("title", ["a", "b"], computing, messages).svg
    left, unit = 26, 720 / 8  # the slowest: 2 + 4, then 2
    kernels = [(0, 1), (2, 3)], [(0, 2), (2, 1)]  # begin and seconds, of each rank
    waiting = [(0, 2), (5, 1)], [(0, 1), (2, 4), (6, 2)]
    expected = [
        (*bar, f"{1000 * bar[1]} ms of {kind}")
        for both in zip(kernels, waiting, strict=True)
        for kind, lane in zip(("kernels", "messages"), both, strict=True)
        for bar in lane
    ]
    assert bars(svg) == [(left + begin * unit, width * unit, tip) for begin, width, tip in expected]
    assert ">8e+03 ms<" in svg and ">3 stages<" in svg
