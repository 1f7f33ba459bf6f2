"""Cases and long problems of records, within sizes that a run draws: constructors of a Case and of a pattern list all
ranks and heads, so sizes are validated first."""

from __future__ import annotations

import re
from collections.abc import Iterator

from reference import validators
from verification.case import Case
from verification.check.laws.law import MAX_INTEGER
from verification.check.supported import check_supported
from verification.problems.long_problems import OWN, LongProblem
from verification.run.backends import MAX_RANKS

_LIMITS = {
    "world": max(MAX_RANKS.values()), "tokens": 2**17, "batch": 2**12, "heads": 2**12, "kv_heads": 2**12,
    "head_dim": 2**12, "value_dim": 2**12, "bucket": MAX_INTEGER,
}  # fmt: skip
_LONGEST = 2**24  # tokens of a long problem


def read_own_case(data: object) -> Case:
    """Return the Case of a record that this project's own attention runs. Raises ValueError."""
    case = read_case(data)
    if not case.backward:
        raise ValueError("backward is False; it must be True: only peers run forward alone")
    return case


def read_case(data: object) -> Case:
    """Return the Case of a record. Raises ValueError, also for one that `ring_attention` does not support."""
    if isinstance(data, dict):
        for name, most in _LIMITS.items():
            if name in data:
                validators.at_most(name, data[name], most)
        for number in _integers(data.get("pattern")):
            validators.at_most("an integer of pattern", number, MAX_INTEGER)
    case = Case.from_dict(data)
    check_supported(case)
    return case


def _integers(data: object) -> Iterator[int]:
    """Yield the integers in nested dicts and lists."""
    if isinstance(data, (dict, list)):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _integers(value)
    elif isinstance(data, int):
        yield data


def read_long(data: object) -> LongProblem:
    """Return the LongProblem of a record. Raises ValueError."""
    problem = LongProblem.from_dict(data)
    validators.at_most("tokens", problem.tokens, _LONGEST)
    if problem.kind == OWN:
        for number in re.findall(r"\d+", problem.line):
            validators.at_most("an integer of line", int(number), _LONGEST)
        LongProblem.own(problem.world, problem.line)
    return problem
