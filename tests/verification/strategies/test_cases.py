"""The strategies draw valid Cases only, reach every feature, and have the simplest choice first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, find, settings
from hypothesis import strategies as st

from tests.support.drawing import QUIET, draw_many
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.laws import LAWS, Law
from verification.check.supported import check_supported
from verification.experiments import law_experiment
from verification.report.coverage import FEATURES, Coverage
from verification.run.layouts import layout_of
from verification.strategies.cases import cases, cases_and_chunks
from verification.strategies.corner_cases import MAX_TOKENS, RARE
from verification.strategies.documents import (
    documents_of,
)

DRAWS = 400  # for each world size
drawn_documents = st.composite(documents_of)
SHRINKING = settings(QUIET, phases=(Phase.generate, Phase.shrink), max_examples=3000)
# Features that a law is about: some of its Cases on three ranks must have each.
LAW_FEATURES = {
    "same on any ranks, layout, exchange": ("uneven cuts", "GQA", "dead row", "sinks", "softcap"),
    "same bits on any ranks": (
        "several chunks on a rank",
        "slices",
        "sinks",
        "GQA",
        "dtype float64",
        "several batches",
    ),
    "later tokens change nothing": ("causal", "dilation", "segment on several ranks", "slices of later keys"),
    "a mask written in another way": ("slices", "causal", "window", "several documents", "band away from the diagonal"),
    "a tree equals its leaves": ("several slices", "slice on two shards", "slice longer than a shard", "sinks", "GQA"),
    "batches and heads permute": ("several batches", "GQA", "offsets by head", "sinks"),
    "equal values come out": ("dtype float64", "huge scores", "GQA", "causal", "dead row", "softcap"),
    "NaN and inf propagate": ("dead row", "causal", "kernel flash", "kernel math"),
    "scores of -inf have no weight": ("dead row", "GQA", "kernel flash", "sinks"),
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
    for world in (1, 2, 3, 4):
        drawn = draw_many(cases_and_chunks(world), DRAWS)
        for case in drawn:
            layout = layout_of(case)
            assert (layout.n, layout.world_size) == (case.tokens, len(case.ranks))
            assert Case.from_json(case.to_json()) == case
        counts = counts_of(drawn)
        assert world > 1 or not any(counts[name] for name in ("subgroup", "empty shard", "segment on several ranks"))
        total = {name: total[name] + count for name, count in counts.items()}
    # A law has what is too large for most examples.
    assert {name for name, count in total.items() if not count} <= {"scores larger than queries"}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_laws_draw_what_they_are_about(law: Law) -> None:
    subjects, validate = draw_many(law.draw(3), 200), law_experiment(law).validate
    assert validate is not None
    for subject in subjects:
        validate(subject)
    counts = counts_of([case for case, _ in subjects])
    assert [name for name in LAW_FEATURES.get(law.name, ()) if not counts[name]] == []


@pytest.mark.parametrize("number", RARE)
def test_rare_cases_are_supported_on_their_ranks(number: int) -> None:
    fewest, most, make = RARE[number]

    @st.composite
    def made(draw: st.DrawFn, world: int) -> Case:
        return make(draw, replace(draw(cases(world)), keys=None))  # the keys are drawn after it

    for world in {fewest, min(most, fewest + 1)}:
        for case in draw_many(made(world), 30):
            if fewest <= len(case.ranks) <= most:
                check_supported(case)
                assert case.tokens <= 2 * MAX_TOKENS


@pytest.mark.parametrize("world", (1, 2, 8))
def test_the_simplest_choice_comes_first(world: int) -> None:
    simplest = find(cases(world), lambda case: True, settings=settings(QUIET, max_examples=DRAWS))
    assert simplest == plain(world, tokens=1, heads=1, kv_heads=1, head_dim=1, kernel="auto")
    documents = drawn_documents(32, (16,))
    assert find(documents, lambda found: True, settings=SHRINKING) is None
    assert find(documents, lambda found: found is not None, settings=SHRINKING) == (32,)
    few = find(documents, lambda found: len(found or ()) > 2, settings=SHRINKING)
    assert few is not None and len(few) == 3
