"""Bounds of serving, and its usual mistakes, by small numbers: no ranks run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.serving_faults import FAULTS
from verification.failures import WrongResult
from verification.serving import ServingCase
from verification.serving.expected import expect
from verification.serving.server import load_server
from verification.serving.serving_checks import SERVING_CHECKS
from verification.serving.serving_rank import Results
from verification.serving.stores import mistakes, seen_by

RIGHT = load_server(f"{FAULTS}:right")
ALONE = ServingCase(world=1, calls=((3,),))


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_a_result_that_is_not_finite_is_wrong(wrong: float) -> None:
    expectation = expect(RIGHT, ALONE)
    results: Results = [{name: x.copy() for name, x in call[0].items()} for call in expectation.exact]
    assert SERVING_CHECKS["merged"](ALONE, expectation, [results])["out"] == 0
    results[0]["out"][2, 0, 1] = wrong
    with pytest.raises(WrongResult, match=f"out is {wrong} at position 2 of slot 0, head 0, dim 1"):
        SERVING_CHECKS["merged"](ALONE, expectation, [results])


def test_no_more_parts_than_keys_are_merged() -> None:
    """A bound that grows with parts that are not there hides errors."""
    few, many = (expect(replace(RIGHT, splits=splits), ALONE).bound[0][0]["out"] for splits in (3, 1000))
    assert (few == many).all()


@pytest.mark.parametrize(
    "words, second",
    [
        ("a query did not see its own position", (0,)),
        ("there were no causal mask", (0, 1, 2)),
        ("nothing were wrong", (0, 1)),
    ],
)
def test_mistakes_see_what_their_words_say(words: str, second: tuple[int, ...]) -> None:
    (rules,) = [rules for said, rules in mistakes(ALONE) if said == words]
    assert seen_by(ALONE, rules)[0, 1, 0] == second
