"""Fields of JSON that a report reads back: each function returns the value, or raises ValueError naming the field."""

from __future__ import annotations

import math


def whole(name: str, value: object, least: int = 0) -> int:
    """An integer of at least that."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    return value


def real(name: str, value: object) -> float:
    """A finite number of at least 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0")
    return float(value)


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be text")
    return value
