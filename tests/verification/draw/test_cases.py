"""The strategies draw valid Cases only, reach every feature, and have the simplest choice first."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from reference.exact import multiplicity
from reference.pattern import Branch
from tests.support.drawing import QUIET, draw_many
from verification.case import Case
from verification.check.laws import LAWS, Law
from verification.draw.cases import cases
from verification.draw.decoding import digits, head_range, permutation
from verification.report.coverage import FEATURES, Coverage
from verification.run.layouts import layout_of
from verification.runner import law_experiment
from verification.search.leaving_out import least

DRAWS = 400  # for each world size
WORLDS = (1, 2, 3, 4)
# A law has what is too large for most examples.
LEFT_TO_LAWS = {"scores larger than queries"}
# On one rank there are no others.
TAKES_OTHERS = {
    "subgroup", "subgroup without rank 0", "empty shard", "fewer tokens than ranks", "ranks do not divide tokens",
    "uneven cuts", "segment on several ranks", "document on several ranks", "document that ends by a shard's end",
    "window over a shard's end", "document on three ranks", "window on three ranks",
}  # fmt: skip
# Features that a law is about: some of its Cases on three ranks must have each.
LAW_FEATURES = {
    "same on any ranks, layout, exchange": ("uneven cuts", "GQA", "dead row"),
    "later tokens change nothing": ("causal", "dilation", "segment on several ranks"),
    "batches and heads permute": ("several batches", "GQA", "offsets by head"),
    "equal values come out": ("dtype float64", "huge scores", "GQA", "causal", "dead row"),
    "NaN and inf propagate": ("dead row", "causal", "kernel flash", "kernel math"),
    "scores of -inf have no weight": ("dead row", "GQA", "kernel flash"),
    "wrong calls refused everywhere": ("dtype float16", "exchange gather", "dead row"),
    "no call takes another for its like": ("GQA", "causal", "dilation", "several documents"),
    "a call leaves nothing behind": ("exchange gather", "dtype float16", "GQA"),
    "calls are not confused": ("exchange gather", "subgroup", "ranks do not divide tokens", "again meta"),
    "memory of longer shards": ("scores larger than queries", "uneven cuts", "MQA", "order permuted"),
    "error does not grow with ranks": ("dtype bfloat16", "query rows cut", "order striped"),
    "a broken-off call closes its group": ("exchange gather", "exchange direct", "lse alone"),
    "streams do not matter": ("exchange gather", "several documents", "causal"),
}


def counts_of(drawn: list[Any]) -> dict[str, int]:
    coverage = Coverage()
    for case in drawn:
        coverage.add(case)
    return coverage.to_dict()


@pytest.mark.slow
def test_every_feature_is_reached_by_valid_cases() -> None:
    total = dict.fromkeys(FEATURES, 0)
    for world in WORLDS:
        drawn = draw_many(cases(world), DRAWS)
        for case in drawn:
            layout = layout_of(case)
            assert (layout.n, layout.world_size) == (case.tokens, len(case.ranks))
            assert Case.from_json(case.to_json()) == case
        counts = counts_of(drawn)
        assert world > 1 or not any(counts[name] for name in TAKES_OTHERS)
        total = {name: total[name] + count for name, count in counts.items()}
    assert {name for name, count in total.items() if not count} <= LEFT_TO_LAWS


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_laws_draw_what_they_are_about(law: Law) -> None:
    subjects = draw_many(law.draw(3), 200)
    premise = law_experiment(law).premise
    assert premise is not None
    for subject in subjects:
        premise(subject)
    counts = counts_of([case for case, _ in subjects])
    assert [name for name in LAW_FEATURES.get(law.name, ()) if not counts[name]] == []


@pytest.mark.parametrize("world", (1, 2, 8))
def test_the_simplest_choice_comes_first(world: int) -> None:
    simplest = find(cases(world), lambda case: True, settings=settings(QUIET, max_examples=DRAWS))
    assert simplest.pattern.branches == (Branch(),) and not simplest.pattern.causal
    assert (simplest.tokens, simplest.heads, simplest.kv_heads, simplest.head_dim, simplest.batch) == (1, 1, 1, 1, 1)
    assert (simplest.order, simplest.cuts, simplest.group, simplest.bucket) == ("contiguous", None, None, None)
    assert (simplest.dtype, simplest.exchange, simplest.kernel) == ("float32", "ring", "auto")
    assert (simplest.lse, simplest.values, simplest.strided, simplest.scale) == ("unused", "normal", False, None)
    assert (simplest.again, simplest.measured, simplest.pattern.documents) == ("alike", False, None)


def test_shrinks_away_what_a_defect_does_not_need() -> None:
    def defect(case: Case) -> bool:
        """Rows see something: where nobody does is a pattern drawn by itself, and another least Case."""
        causal, dilated = case.pattern.causal, any(b.dilation_rate > 1 for b in case.pattern.branches)
        seen = multiplicity(case.pattern, case.heads, case.tokens)
        return causal and dilated and case.tokens >= 5 and bool(seen.any())

    shrinking = settings(database=None, deadline=None, phases=(Phase.generate, Phase.shrink), max_examples=500)
    case = least(find(cases(4), defect, settings=shrinking), defect)
    assert case.tokens == 5 and case.pattern.branches == (Branch(dilation_rate=2),)
    assert (case.dtype, case.order, case.exchange, case.heads) == ("float32", "contiguous", "ring", 1)
    assert case.pattern.documents is None


@given(st.integers(1, 5), st.data())
@settings(database=None, deadline=None, max_examples=50)
def test_decoders_reach_everything_once(count: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, count))
    arrangements = {permutation(i, range(count), size) for i in range(math.perm(count, size))}
    assert len(arrangements) == math.perm(count, size)
    assert permutation(0, range(count), size) == tuple(range(size))
    ranges = [head_range(i, count) for i in range(1 + count * (count + 1) // 2)]
    assert ranges[0] is None and len(set(ranges)) == len(ranges)
    assert all(r is None or 0 <= r.start < r.stop <= count for r in ranges)
    assert len({digits(i, 3, count) for i in range(3**count)}) == 3**count
