"""Validators, one for each kind of field.

Each returns the value, or raises a ValueError that names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for an int, but not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Return Python's integers in place of NumPy's, and lists of them in place of arrays and tensors."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.tolist()
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """Validate an int from `least` to `most`, both included; None: no upper limit."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    return value


def integers(name: str, value: object) -> tuple[int, ...]:
    """Validate a tuple or list of ints >= 0, and return a tuple. The caller handles None."""
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name} is {value!r}; it must be a tuple of integers or None")
    return tuple(integer(f"an entry of {name}", entry, 0) for entry in value)


def offsets(name: str, value: object, parts: int, most: int) -> tuple[int, ...]:
    """Validate the parts + 1 non-decreasing ints from 0 to `most` that cut a sequence into parts."""
    found = integers(name, value)
    if len(found) != parts + 1 or found[0] != 0 or found[-1] != most or list(found) != sorted(found):
        raise ValueError(f"{name} is {found}; it must be {parts + 1} non-decreasing offsets from 0 to {most}, or None")
    return found


def optional(validate: Callable[..., T], name: str, value: object, *arguments: Any) -> T | None:
    """Validate None, or what another validator takes with these arguments."""
    try:
        return None if value is None else validate(name, value, *arguments)
    except ValueError as error:
        raise ValueError(f"{error}, or None") from None


def _is_number(value: object) -> TypeGuard[float]:
    """Return True for a float, or an int that one can hold."""
    return isinstance(value, float) or (is_integer(value) and abs(value) <= sys.float_info.max)


def number(name: str, value: object, most: float) -> float:
    """Validate an int or float of size at most `most`: not NaN and, for a finite `most`, not infinite."""
    if not _is_number(value) or not abs(value) <= most:
        raise ValueError(f"{name} is {value!r}; it must be a number of size at most {most}")
    return float(value)


def real(name: str, value: object) -> float:
    """Validate a finite int or float >= 0."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0")
    return float(value)


def positive(name: str, value: object) -> float:
    """Validate a finite int or float > 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")
    return float(value)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be text")
    return value


def choice(name: str, value: object, allowed: Collection[str]) -> str:
    """Validate one of the strings in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def at_most(name: str, value: object, most: float) -> None:
    """Refuse a number beyond `most`; other validators refuse what is no number."""
    if isinstance(value, (int, float)) and value > most:
        raise ValueError(f"{name} is {value}; it must be at most {most}")


def exactly(what: str, data: Any, names: Collection[str]) -> dict[str, Any]:
    """Validate a JSON object with these fields and no others."""
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        got = f"the fields {', '.join(data) or 'none'}" if isinstance(data, dict) else repr(data)
        raise ValueError(f"{what} must be an object with the fields {', '.join(names) or 'none'}, got {got}")
    return data


def grouped_heads(heads: int, kv_heads: int) -> None:
    """Validate that heads is a multiple of kv_heads: groups of equal size, one for each key/value head."""
    if heads % kv_heads:
        raise ValueError(f"heads is {heads}; it must be a multiple of kv_heads, {kv_heads}")
