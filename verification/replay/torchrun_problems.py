"""Saved problems of ranks that torchrun starts: {"links": {"world": 2}} and {"long": the fields of a LongProblem}."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from reference import validators
from verification.problems.long_problems import OWN, LongProblem
from verification.saved_fields import read_fields

MAX_WORLD, MAX_INTEGER = 2**16, 2**24  # a Case lists all ranks and heads


@dataclass(frozen=True)
class TorchrunProblem:
    """A problem on `world` ranks: long, or, where that is None, the links between them."""

    world: int
    long: LongProblem | None = None


def read_torchrun_problem(record: object) -> TorchrunProblem | None:
    """Read a saved problem; None for a record of another kind. Raises ValueError for a malformed one."""
    if isinstance(record, dict) and "links" in record:
        links = validators.exactly("links", validators.exactly("a record", record, ["links"])["links"], ["world"])
        return TorchrunProblem(validators.integer("world", links["world"], 1, MAX_WORLD))
    if isinstance(record, dict) and "long" in record:
        fields = read_fields(LongProblem, "long", validators.exactly("a record", record, ["long"])["long"])
        validators.integer("world", fields["world"], 1, MAX_WORLD)
        return TorchrunProblem(fields["world"], _long(fields))
    return None


def _long(fields: dict[str, Any]) -> LongProblem:
    problem = LongProblem(**fields)
    validators.at_most("tokens", problem.tokens, MAX_INTEGER)
    if problem.kind == OWN:
        for number in re.findall(r"\d+", validators.text("line", problem.line)):
            validators.at_most("an integer of line", int(number), MAX_INTEGER)
        LongProblem.own(problem.world, problem.line)
    return problem
