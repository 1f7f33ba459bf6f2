"""Cases that are made of drawn ones are Cases, and are what their makers promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from tests.support.drawing import draw_many
from verification.case import Case
from verification.check.supported import check_supported
from verification.draw import rare_cases
from verification.draw.cases import cases
from verification.draw.rare_cases import MOST_TOKENS, RARE

Make = Callable[[st.DrawFn, Case], Case]


def made_by(make: Make, world: int, count: int = 30) -> list[Case]:
    @st.composite
    def strategy(draw: st.DrawFn) -> Case:
        return make(draw, draw(cases(world)))

    return draw_many(strategy(), count)


@pytest.mark.parametrize("number", RARE)
def test_each_is_supported_on_the_ranks_that_it_is_for(number: int) -> None:
    fewest, most, make = RARE[number]
    for world in {fewest, min(most, fewest + 1)}:
        for case in made_by(make, world):
            if fewest <= len(case.ranks) <= most:
                check_supported(case)
                assert case.tokens <= 2 * MOST_TOKENS


def test_nearly_equal_segments_differ_by_a_token_and_have_as_many_rows() -> None:
    found = made_by(rare_cases._nearly_equal_segments, 2)
    lengths = [[branch.segment_length or 0 for branch in case.pattern.branches] for case in found]
    assert {max(some) - min(some) for some in lengths} == {0, 1}
    for case in found:
        rows = {len(range(0, branch.segment_length or 0, branch.dilation_rate)) for branch in case.pattern.branches}
        assert len(rows) == 1 and case.kv_heads == case.heads == len(case.pattern.branches)


def test_uneven_slots_have_segments_that_documents_cut() -> None:
    found = made_by(rare_cases._uneven_slots, 3)
    assert {case.order for case in found} == {"striped"}
    assert {case.exchange for case in found} == {"direct", "ring"}
    cut = [any(length % (case.pattern.branches[0].segment_length or 1) for length in case.pattern.documents or ())
           for case in found]  # fmt: skip
    assert all(cut)
