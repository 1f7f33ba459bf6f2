"""The properties of every example hold for longer shards, too, in which memory shows."""

from __future__ import annotations

from hypothesis import strategies as st

from verification.case import Case
from verification.check import properties
from verification.check.expectation import expect
from verification.check.laws.law import How, Law
from verification.run.backends import Backend
from verification.run.rank import observe
from verification.strategies.cases import long_cases


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    return draw(long_cases(world)), {}


def check_long(backend: Backend, case: Case, how: How) -> float:
    """The properties of every example, on Cases whose scores take more memory than the queries."""
    backend.submit(observe, case, None, False)
    return max(properties.check(case, expect(case), backend.collect()).values())


MEMORY_OF_LONGER_SHARDS = Law("memory of longer shards", _draw, check_long, how={}, share=0.02, most=60)
