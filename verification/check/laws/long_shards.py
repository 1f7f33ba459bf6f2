"""The properties of every example hold for longer shards, too, in which memory shows."""

from __future__ import annotations

from hypothesis import strategies as st

from verification.case import Case
from verification.check import properties
from verification.check.attention_on_ranks import AttentionOnRanks
from verification.check.laws.law import How, Law
from verification.strategies.cases import long_cases


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(long_cases(world)), {}


def check_long(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """The properties of every example, on Cases whose scores take more memory than the queries."""
    observations, expectation = ranks.observe_and_expect(case)
    return max(properties.check(case, expectation, observations).values())


MEMORY_OF_LONGER_SHARDS = Law("memory of longer shards", _draw, check_long, how={}, share=0.02, most=60)
