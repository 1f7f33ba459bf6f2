"""Dataclass fields that declare what they may hold, and are read from JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from dataclasses import fields as fields_of
from typing import Any

from reference import validators
from verification.wording import misfits

# The name of a field and a value -> what the field keeps. Raises ValueError for a value that is not allowed.
Check = Callable[[str, Any], Any]
Metadata = dict[str, Check]


def checked_by(check: Check) -> Metadata:
    return {"check": check}


def integer(least: int, most: int | None = None) -> Metadata:
    return checked_by(lambda name, value: validators.integer(name, value, least, most))


def choice(*allowed: str) -> Metadata:
    return checked_by(lambda name, value: validators.choice(name, value, allowed))


def instance(kind: type, called: str) -> Metadata:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be a {called}")
        return value

    return checked_by(check)


def optional(metadata: Metadata) -> Metadata:
    """None, or what the field may hold otherwise."""
    return checked_by(lambda name, value: None if value is None else metadata["check"](name, value))


FLAG, REAL, INTEGERS = checked_by(validators.flag), checked_by(validators.real), checked_by(validators.integers)


def check_fields(made: Any) -> None:
    """Apply the check of each field of a frozen dataclass. Raises ValueError, naming the field."""
    for one in fields_of(made):
        if "check" in one.metadata:
            object.__setattr__(made, one.name, one.metadata["check"](one.name, getattr(made, one.name)))


def read_fields(kind: type[Any], what: str, data: object) -> dict[str, Any]:
    """Return a JSON object that has the fields of a dataclass. Fields with a default may be missing: files from before
    there were such fields stay good. Raises ValueError for anything else."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(data).__name__}")
    needed = {f.name: f.default is MISSING for f in fields_of(kind)}
    unknown = sorted(set(data) - set(needed))
    missing = sorted({name for name, is_needed in needed.items() if is_needed} - set(data))
    if unknown or missing:
        raise ValueError(f"{what}: {misfits(unknown, missing)}")
    return data
