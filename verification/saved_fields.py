"""Dataclasses that are saved as JSON, with the validator of each field in its metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from typing import Any, Self

from reference import validators

# (name of a field, value) -> the value to store. Raises ValueError for a value that is not allowed.
Check = Callable[[str, Any], Any]
Metadata = dict[str, Callable[..., Any]]


def checked_by(check: Check) -> Metadata:
    return {"check": check}


def integer(minimum: int, maximum: int | None = None) -> Metadata:
    return checked_by(lambda name, value: validators.integer(name, value, minimum, maximum))


def number(maximum: float, minimum: float | None = None) -> Metadata:
    """Require a number of size up to `maximum` and, if given, of at least `minimum`."""

    def check(name: str, value: object) -> float:
        size = validators.number(name, value, maximum)
        if minimum is not None:
            validators.at_least(name, size, minimum)
        return size

    return checked_by(check)


def choice(*allowed: str) -> Metadata:
    return checked_by(lambda name, value: validators.choice(name, value, allowed))


def instance(kind: Any, type_name: str) -> Metadata:
    """Require an instance of a class that has `to_dict` and `from_dict`."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be a {type_name}")
        return value

    return {"check": check, "read": kind.from_dict}


def optional(metadata: Metadata) -> Metadata:
    """Allow None as well."""
    checked = checked_by(lambda name, value: validators.optional(metadata["check"], name, value))
    if "read" in metadata:
        checked["read"] = lambda value: None if value is None else metadata["read"](value)
    return checked


FLAG, REAL = checked_by(validators.flag), checked_by(validators.real)
# None is allowed, too: the validator's words have it.
INTEGERS = checked_by(lambda name, value: None if value is None else validators.integers(name, value))


@dataclass(frozen=True)
class SavedFields:
    """Base of frozen dataclasses. Raises ValueError when made, naming the field, its value and what is allowed."""

    def __post_init__(self) -> None:
        for field in fields_of(self):
            if "check" in field.metadata:
                object.__setattr__(self, field.name, field.metadata["check"](field.name, getattr(self, field.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; `from_dict` turns it back into an equal object."""
        values = {field.name: getattr(self, field.name) for field in fields_of(self)}
        return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read the JSON object that `to_dict` returns.

        Args:
            data: a dict of all fields by name. Those with a default may be missing, so that older files stay valid.

        Raises:
            ValueError: data is something else, a field is unknown or missing, or its value is wrong.
        """
        title = f"a {cls.__name__}"
        if not isinstance(data, dict):
            raise ValueError(f"{title} must be a JSON object, got {type(data).__name__}")
        known = {field.name: field for field in fields_of(cls)}
        unknown = sorted(set(data) - set(known))
        missing = sorted({name for name, field in known.items() if field.default is MISSING} - set(data))
        listed = [
            f"{how} field{'s' if len(names) > 1 else ''} {', '.join(names)}"
            for how, names in (("unknown", unknown), ("missing", missing))
            if names
        ]
        if listed:
            raise ValueError(f"{title}: {', '.join(listed)}")
        read = {name: known[name].metadata.get("read", lambda value: value) for name in data}
        return cls(**{name: read[name](value) for name, value in data.items()})
