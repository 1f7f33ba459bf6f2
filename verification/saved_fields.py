"""Fields of a dataclass, read from JSON."""

from __future__ import annotations

from dataclasses import MISSING
from dataclasses import fields as fields_of
from typing import Any


def read_fields(kind: type[Any], title: str, data: object) -> dict[str, Any]:
    """Return a JSON object that has the fields of a dataclass. Fields with a default may be missing, so that older
    files stay valid. Raises ValueError for anything else."""
    if not isinstance(data, dict):
        raise ValueError(f"{title} must be a JSON object, got {type(data).__name__}")
    required = {f.name: f.default is MISSING for f in fields_of(kind)}
    unknown = sorted(set(data) - set(required))
    missing = sorted({name for name, is_required in required.items() if is_required} - set(data))
    listed = [
        f"{how} field{'s' if len(names) > 1 else ''} {', '.join(names)}"
        for how, names in (("unknown", unknown), ("missing", missing))
        if names
    ]
    if listed:
        raise ValueError(f"{title}: {', '.join(listed)}")
    return data
