"""ServingCases: their calls, tensors, lines and JSON; wrong ones are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.drawing import draw_many
from verification.serving import ServingCase
from verification.serving.strategies import serving_cases

CASE = ServingCase(world=2, block=2, calls=((5, 0), (1, 3), (-2, 1)))


def test_a_call_has_lengths_owners_and_starts() -> None:
    first, second, third = CASE.calls_of(1)
    assert (first.new, first.before, first.starts) == ((5, 0), (0, 0), (True, False))
    assert (second.lengths, second.starts) == ((6, 3), (False, True))
    assert (third.new, third.before, third.lengths, third.starts) == ((2, 1), (0, 3), (2, 4), (True, False))
    assert [third.owns(p) for p in range(6)] == [False, False, True, True, False, False]
    assert replace(CASE, replicated=True).calls_of(1)[0].owns(0) and CASE.tokens == 6


def test_draws_what_engines_meet() -> None:
    drawn = draw_many(serving_cases(3), 60)
    assert all(case == ServingCase.from_dict(json.loads(json.dumps(case.to_dict()))) for case in drawn)
    entries = [(new, case, call) for case in drawn for call in case.calls for new in call]
    assert any(new == 0 for new, *_ in entries) and any(new < 0 for new, *_ in entries)
    assert any(1 in call and max(call) > 1 for _, _, call in entries)  # decodes beside a chunk
    assert any(0 < new <= case.block * 2 for new, case, _ in entries if not case.replicated)  # a rank without a key
    assert {case.replicated for case in drawn} == {case.strided for case in drawn} == {False, True}
    assert not any(case.tensors()[0][0].is_contiguous() for case in drawn if case.strided and case.calls[0][0] > 1)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"calls": ()}, r"calls is \(\); it must be a tuple of calls"),
        ({"calls": ((1, 0), (1,))}, "it must be a tuple of calls, each a tuple of an integer for each slot"),
        ({"calls": ((1, 0), (0, -2))}, r"call 1 of calls is \(0, -2\); slot 1 must have had a request"),
        ({"calls": ((1, 0), (0, 0))}, r"call 1 of calls is \(0, 0\); some slot must have new tokens"),
        ({"calls": ((5000,),)}, "up to 64 calls and slots, and 4096 tokens in all"),
        ({"block": 0}, "block is 0; it must be an integer from 1 to 4096"),
    ],
)
def test_refuses_wrong_fields_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(CASE, **changes)
