"""What an expectation counts bounds what the plans do: nothing is merged more often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arithmetic import most_seen, most_taken
from reference.exact import multiplicity
from reference.pattern import Branch, Pattern
from ring.plan.tile import Tile
from tests.ring.plan.plan_walk import PlanSetting, PlanWalk
from tests.support.plain_case import plain
from verification.case import EXCHANGES, Case
from verification.check.expectation import counts_of
from verification.draw.cases import cases
from verification.run.layouts import layout_of


class CountedWalk(PlanWalk):
    """Counts the tiles too that give a row of a query head something, and those that give a key something for it."""

    def __init__(self, case: Case) -> None:
        bucket, heads = case.tokens_per_call, (case.heads, case.kv_heads)
        super().__init__(PlanSetting(case.pattern, layout_of(case), *heads, case.exchange, bucket))
        self.of_rows, self.of_keys = (np.zeros((case.heads, case.tokens), np.int64) for _ in range(2))

    def _compute(self, rank: int, tile: Tile, *rest: Any) -> None:
        before = self.pairs.copy()
        super()._compute(rank, tile, *rest)
        seen = self.pairs > before
        self.of_rows += seen.any(2)
        self.of_keys += seen.any(1)


def most_merged(case: Case) -> tuple[int, int]:
    """The most partial results of a row, and partial gradients of a key from all of its query heads."""
    (walk := CountedWalk(case)).go()
    of_keys = walk.of_keys.reshape(case.kv_heads, -1, case.tokens).sum(1)
    return int(walk.of_rows.max(initial=0)), int(of_keys.max(initial=0))


def shared(world: int, tokens: int, branch: Branch, **changes: Any) -> Case:
    return plain(world, tokens=tokens, pattern=Pattern((branch,), True), **changes)


@pytest.mark.parametrize(
    "case, merged",
    [
        (shared(1, 48, Branch(window=5)), 2),
        (shared(4, 48, Branch(window=14)), 4),
        (shared(4, 48, Branch(12, window=11)), 1),  # it hides nothing
        (shared(4, 128, Branch(16), order="striped"), 6),  # the last key travels by itself
        (shared(3, 55, Branch(27), order="striped", cuts=(0, 41, 45, 55)), 5),
    ],
)
def test_what_rows_are_merged_from(case: Case, merged: int) -> None:
    assert most_merged(case)[0] == merged <= counts_of(case, "math").merges


@given(data=st.data())
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
def test_nothing_is_merged_more_often(data: st.DataObject) -> None:
    case = data.draw(cases(data.draw(st.sampled_from((1, 2, 3, 4, 8)))))
    for exchange in EXCHANGES:
        for bucket in {case.bucket, None, 3}:
            other = replace(case, exchange=exchange, bucket=bucket)
            counts = counts_of(other, "math")
            of_rows, of_keys = most_merged(other)
            assert of_rows <= counts.merges and of_keys <= counts.row_merges, other.to_json()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("branch", (Branch(window=4), Branch(9, window=3), Branch(None, 3, 1, window=7)))
def test_counts_of_keys_and_rows_of_a_window(branch: Branch, causal: bool) -> None:
    count = multiplicity(Pattern((branch,), causal), 4, 24)
    keys, rows = most_seen(Pattern((branch,), causal), 24, heads=4, kv_heads=2)
    assert keys == count.sum(-1).max() and rows == count.reshape(2, -1, 24).sum(1).max()


def test_a_window_that_hides_nothing_cuts_nothing() -> None:
    assert most_taken(Branch(8, window=7), True, 24) == 1 and most_taken(Branch(8, window=6), True, 24) == 3
    assert most_taken(Branch(None, 4, window=23), False, 24) == 1
    assert most_taken(Branch(None, 4, window=19), False, 24) == 5
