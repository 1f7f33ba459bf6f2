"""Saved problems of ranks that torchrun starts: read, or refused with the field."""

from __future__ import annotations

from typing import Any

import pytest

from verification.problems.long_problems import LongProblem
from verification.replay.torchrun_problems import TorchrunProblem, read_torchrun_problem

LONG = {"world": 2, "tokens": 128, "kind": "dense float32"}
OWN = {"world": 2, "tokens": 64, "kind": "own", "line": "tokens=64 causal=true"}


def test_problems_are_read() -> None:
    assert read_torchrun_problem({"links": {"world": 3}}) == TorchrunProblem(3)
    assert read_torchrun_problem({"long": LONG}) == TorchrunProblem(2, LongProblem(2, 128, "dense float32"))
    assert read_torchrun_problem({"long": OWN}) == TorchrunProblem(2, LongProblem(**OWN))  # type: ignore[arg-type]
    assert read_torchrun_problem({"law": 1}) is None and read_torchrun_problem(["links"]) is None


@pytest.mark.parametrize(
    "record, said",
    [
        ({"links": 1}, "links must be an object with the fields world, got 1"),
        ({"links": {"world": "\x1b[31m"}}, r"world is '\\x1b\[31m'; it must be an integer from 1 to 65536"),
        ({"links": {"world": 2}, "long": LONG}, "a record must be an object with the fields links"),
        ({"long": [LONG]}, "long must be a JSON object, got list"),
        ({"long": {"tokens": 64}}, "long: missing fields kind, world"),
        ({"long": LONG | {"world": None}}, "world is None; it must be an integer"),
        ({"long": LONG | {"tokens": 10**12}}, "tokens is 1000000000000; it must be at most"),
        ({"long": LONG | {"kind": []}}, "kind is "),
        ({"long": OWN | {"line": 5}}, "line is 5"),
        ({"long": OWN | {"line": "tokens=64 heads=9999999999"}}, "an integer of line is 9999999999"),
        ({"long": OWN | {"line": "tokens=64 world=3"}}, "world is 3"),
    ],
)
def test_a_malformed_problem_is_refused(record: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_torchrun_problem(record)
