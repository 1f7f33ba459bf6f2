"""What the judge knows: an expectation's counts bound what the plans do, and the oracle and its twin agree."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arithmetic import most_seen, most_taken
from reference.exact import QUANTITIES, multiplicity
from reference.pattern import Branch, Pattern
from ring.plan.tile import Tile
from tests.ring.plan.plan_walk import PlanSetting, PlanWalk
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from verification.case import EXCHANGES, Case
from verification.check import properties, twin
from verification.check.expectation import counts_of, expect
from verification.draw.cases import cases
from verification.failures import WrongResult
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


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return [case for case in draw_many(cases(2), 100) if twin.is_compared(case)]


def test_oracle_and_twin_agree_far_within_what_rounding_allows(drawn: list[Case]) -> None:
    assert len(drawn) > 60
    for case in drawn:
        ratios = twin.check_twin(case, properties.prepare(case), [])
        assert set(ratios) == set(QUANTITIES) and all(0 <= ratio < 0.5 for ratio in ratios.values())


@pytest.mark.parametrize(
    "name, spoil",
    [*((name, lambda x: x * (1 + 1e-9)) for name in QUANTITIES), ("out", lambda x: torch.where(x == 0, 1e-300, x))],
)
def test_what_the_oracle_alone_computes_is_found(
    name: str, spoil: Any, drawn: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, at = twin.attention_and_gradients, QUANTITIES.index(name)

    def spoilt(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        return *found[:at], spoil(found[at]), *found[at + 1 :]

    monkeypatch.setattr(twin, "attention_and_gradients", spoilt)
    with pytest.raises(WrongResult, match=f"^oracle: {name} is ") as caught:
        for case in drawn:
            properties.check(case, properties.prepare(case), [], ("oracle",))
    assert caught.value.broken == "oracle and its twin agree"


def test_what_is_too_large_for_the_oracle_is_left_out_and_not_counted() -> None:
    large = plain(1, tokens=129, heads=1, kv_heads=1)
    (looked_at,) = (one for one in properties.PROPERTIES if "oracle" in one.checks)
    assert 129**2 > twin.MOST_SCORES >= 128**2
    assert not looked_at.concerns(large) and looked_at.concerns(replace(large, tokens=128))
    assert twin.check_twin(large, expect(large), []) == {}


@pytest.mark.parametrize(
    "oracle_, twin_, allowed, held",
    [(np.nan, 1.0, np.inf, True), (np.inf, np.inf, 0.0, True), (np.nan, 1.0, 1.0, False), (1.0, 1.5, 0.0, False)],
)
def test_bounds_that_know_nothing_allow_anything_and_nan_is_within_none(
    oracle_: float, twin_: float, allowed: float, held: bool
) -> None:
    with nullcontext() if held else pytest.raises(WrongResult, match="oracle: out is"):
        assert twin._compare("out", *(np.array([x]) for x in (oracle_, twin_, allowed))) == 0.0
