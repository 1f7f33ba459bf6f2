"""Validators declared in the metadata of dataclass fields, and the reading of such fields from JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from dataclasses import fields as fields_of
from typing import Any

from reference import validators
from verification.wording import misfits

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


def read_fields(kind: type[Any], title: str, data: object) -> dict[str, Any]:
    """Return a JSON object that has the fields of a dataclass. Fields with a default may be missing, so that older
    files stay valid. Raises ValueError for anything else."""
    if not isinstance(data, dict):
        raise ValueError(f"{title} must be a JSON object, got {type(data).__name__}")
    required = {f.name: f.default is MISSING for f in fields_of(kind)}
    unknown = sorted(set(data) - set(required))
    missing = sorted({name for name, is_required in required.items() if is_required} - set(data))
    if unknown or missing:
        raise ValueError(f"{title}: {misfits(unknown, missing)}")
    return data
