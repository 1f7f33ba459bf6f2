"""Validators declared in the metadata of dataclass fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any

from reference import validators

# (name of a field, value) -> the value to store. Raises ValueError for a value that is not allowed.
Check = Callable[[str, Any], Any]
Metadata = dict[str, Check]


def checked_by(check: Check) -> Metadata:
    return {"check": check}


def integer(minimum: int, maximum: int | None = None) -> Metadata:
    return checked_by(lambda name, value: validators.integer(name, value, minimum, maximum))


def choice(*allowed: str) -> Metadata:
    return checked_by(lambda name, value: validators.choice(name, value, allowed))


def instance(kind: type, type_name: str) -> Metadata:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be a {type_name}")
        return value

    return checked_by(check)


def optional(metadata: Metadata) -> Metadata:
    """Allow None as well."""
    return checked_by(lambda name, value: None if value is None else metadata["check"](name, value))


FLAG, REAL, INTEGERS = checked_by(validators.flag), checked_by(validators.real), checked_by(validators.integers)


def check_fields(record: Any) -> None:
    """Apply the check of each field of a frozen dataclass. Raises ValueError, naming the field."""
    for field in fields_of(record):
        if "check" in field.metadata:
            object.__setattr__(record, field.name, field.metadata["check"](field.name, getattr(record, field.name)))
