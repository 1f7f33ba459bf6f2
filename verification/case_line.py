"""A Case written in a line: `world=2 tokens=16 heads=4 kv_heads=2 causal=true`."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from reference.pattern import Branch, Pattern
from verification.case import Case

# What is not written: dense attention on all ranks, nothing unusual.
DEFAULTS: dict[str, Any] = {
    "world": 2, "group": None, "tokens": 16, "order": "contiguous", "cuts": None, "batch": 1, "heads": 1,
    "head_dim": 16, "dtype": "float32", "scale": None, "score_scale": 1.0, "values": "normal", "seed": 0,
    "exchange": "ring", "bucket": None, "kernel": "math", "lse": "unused", "strided": False,
}  # fmt: skip
_BRANCH = ("segment_length", "dilation_rate", "offset", "window", "slices")
NAMES = (*(field.name for field in fields(Case) if field.name != "pattern"), "causal", "documents", *_BRANCH)
_PARTS = re.compile(r'(?:[^\s"]|"[^"]*"?)+')  # spaces divide them, except between quotes
_TYPES = {field.name: str(field.type) for kind in (Branch, Pattern, Case) for field in fields(kind)}


def read_case_line(text: str) -> Case:
    """Return the Case of a line.

    Args:
        text: `name=value` parts with spaces between. A name is a field of Case but `pattern`, or one of its pattern
            with one branch: causal, documents, segment_length, dilation_rate, offset, window, slices. A value is JSON,
            or a word; of several words, `"dealt chunks"`; of several numbers, `3,5,8`; of slices,
            `[[0,8,0,8,null,0]]`; `none` for None. What is missing is as in DEFAULTS; kv_heads are as many as heads.

    Raises:
        ValueError: an unknown name, one given twice or without a value, or a value that the field does not allow.
    """
    given: dict[str, Any] = {}
    for part in _PARTS.findall(text):
        name, _, value = part.partition("=")
        if name not in NAMES or not value:
            raise ValueError(f"{part!r} is no name=value of a Case; the names are {', '.join(NAMES)}")
        if name in given:
            raise ValueError(f"{name} must be given once, got {given[name]!r} and then {value!r}")
        given[name] = _value(name, value)
    branch = Branch(**{name: given.pop(name) for name in _BRANCH if name in given})
    pattern = Pattern((branch,), given.pop("causal", False), given.pop("documents", None))
    given.setdefault("kv_heads", given.get("heads", DEFAULTS["heads"]))
    return Case(**DEFAULTS | given, pattern=pattern)


def write_case_line(case: Case) -> str | None:
    """Return the line that `read_case_line` reads as this Case; None for one that no line has, as of several branches.

    Args:
        case: any Case.
    """
    written, usual = (_flat(x) for x in (case, read_case_line(f"world={case.world} heads={case.heads}")))
    usual |= {"world": None, "heads": DEFAULTS["heads"]}
    line = " ".join(
        f"{name}={value if isinstance(value, str) and ' ' not in value else json.dumps(value, separators=(',', ':'))}"
        for name, value in written.items() if value != usual[name]
    )  # fmt: skip
    try:
        return line if read_case_line(line) == case else None
    except ValueError:
        return None


def _flat(case: Case) -> dict[str, Any]:
    """Return the fields of the Case that a line has, with those of its pattern and its first branch."""
    fields = case.to_dict()
    pattern = fields.pop("pattern")
    of_branch = {name: pattern["branches"][0].get(name) for name in _BRANCH}
    return of_branch | {name: pattern[name] for name in ("causal", "documents")} | fields


def _value(name: str, text: str) -> Any:
    if _TYPES[name].endswith("None") and text.lower() in ("none", "null"):
        return None
    if _TYPES[name].startswith("tuple") and not text.startswith("[["):
        text = f"[{text.strip('[]')}]"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value
