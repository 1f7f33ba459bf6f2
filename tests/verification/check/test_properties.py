"""A failure carries the property that it breaks; the checks and the properties belong together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.verification.check.test_checks import case, honest
from verification.check import properties
from verification.check.checks import CHECKS
from verification.check.expectation import expect
from verification.failures import RankCrash, WrongResult


def test_every_check_belongs_to_a_property() -> None:
    for name in CHECKS:
        assert any(name in one.checks for one in properties.PROPERTIES), name


@pytest.mark.parametrize(
    "name, title",
    [
        ("out", "output and lse"),
        ("lse", "output and lse"),
        ("dq", "gradients"),
        ("dv", "gradients"),
        ("inputs_unchanged", "inputs intact, repeatable"),
        ("repeat_equal", "inputs intact, repeatable"),
        ("buffer_forward", "buffers"),
    ],
)
def test_a_failure_carries_the_property_that_it_breaks(name: str, title: str) -> None:
    given = case(order="contiguous")
    expectation = expect(given)
    right = honest(given, expectation)
    assert properties.check(given, expectation, right)[title] <= 1
    before: Any = getattr(right[0], name)
    change: dict[str, Any] = {name: not before if isinstance(before, bool) else before + 3}
    wrong = [replace(right[0], **change), *right[1:]]
    with pytest.raises(WrongResult) as caught:
        properties.check(given, expectation, wrong, [one for one in CHECKS if one != "unseen"])
    assert caught.value.broken == properties.broken_by(caught.value) == title


def test_a_failure_that_no_check_raised_is_that_of_a_rank() -> None:
    assert properties.broken_by(RankCrash("rank 1 died")) == "every rank answers"


def test_of_some_checks_only_whole_properties_are_reported() -> None:
    given = case()
    expectation = expect(given)
    found = properties.check(given, expectation, honest(given, expectation), ("answers", "values", "gradients"))
    assert list(found) == ["every rank answers", "output and lse", "gradients"]
