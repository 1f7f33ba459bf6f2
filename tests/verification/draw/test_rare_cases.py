"""Cases that are made of drawn ones are Cases for the ranks that they need."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tests.support.drawing import draw_many
from verification.case import Case
from verification.check.supported import check_supported
from verification.draw.cases import cases
from verification.draw.rare_cases import MOST_TOKENS, RARE


@pytest.mark.parametrize("number", RARE)
def test_each_is_supported_on_the_ranks_that_it_is_for(number: int) -> None:
    fewest, most, make = RARE[number]

    @st.composite
    def made(draw: st.DrawFn, world: int) -> Case:
        return make(draw, draw(cases(world)))

    for world in {fewest, min(most, fewest + 1)}:
        for case in draw_many(made(world), 30):
            if fewest <= len(case.ranks) <= most:
                check_supported(case)
                assert case.tokens <= 2 * MOST_TOKENS
