"""Readers of saved counter-examples. A file may have been edited, or come from elsewhere, so every field is validated.

They refuse Cases that `ring_attention` does not support, laws with invalid arguments, and sizes that no run draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from reference import validators
from verification.case import Case
from verification.check.laws import LAWS
from verification.check.laws.law import MAX_INTEGER
from verification.check.supported import check_supported
from verification.experiments import EXAMPLES, law_experiment
from verification.problems import real_size
from verification.replay.registry import READERS, REMOVED, Saved, SavedExample
from verification.report.report import Report
from verification.run.backends import MAX_RANKS, Backend

_LIMITS = {
    "world": max(MAX_RANKS.values()), "tokens": 2**17, "batch": 2**12, "heads": 2**12, "kv_heads": 2**12,
    "head_dim": 2**12, "bucket": MAX_INTEGER,
}  # fmt: skip


def parse(record: object) -> Saved:
    """Return the counter-example of a JSON record. Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"a counter-example must be a JSON object, got {type(record).__name__}")
    reader = next((name for field, name in READERS.items() if field in record), None)
    return SavedExample(EXAMPLES, read_case(record), record) if reader is None else resolve_name(reader)(record)


def read_case(data: object) -> Case:
    """Return the Case of a record. Sizes are validated first: the constructors of a Case and a pattern list all ranks
    and heads. Raises ValueError."""
    if isinstance(data, dict):
        for name, most in _LIMITS.items():
            if name in data:
                validators.at_most(name, data[name], most)
        for number in _integers(data.get("pattern")):
            validators.at_most("an integer of pattern", number, MAX_INTEGER)
    case = Case.from_json(json.dumps(data))
    check_supported(case)
    return case


def _integers(data: object) -> Iterator[int]:
    """Yield the integers in nested dicts and lists."""
    if isinstance(data, (dict, list)):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _integers(value)
    elif isinstance(data, int):
        yield data


def read_law(record: dict[str, Any]) -> Saved:
    validators.exactly("a counter-example of a law", record, ["law", "case", "how"])
    known = {law.name: law for law in LAWS}
    name, how = record["law"], record["how"]
    if isinstance(name, str) and name in REMOVED:
        raise ValueError(f"law is {name!r}, which runs check no more; it is tested in {REMOVED[name]}")
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"law is {name!r}; it must be one of {', '.join(known)}")
    case = read_case(record["case"])
    known[name].validate(case, how)
    return SavedExample(law_experiment(known[name]), (case, how), record)


@dataclass(frozen=True)
class _SavedProblem(Saved):
    problem: real_size.RealSizeProblem

    @property
    def world(self) -> int:
        return self.problem.world

    def run(self, backend: Backend, report: Report, file: Path) -> None:
        real_size.run(backend, report, self.problem, file.parent)


def read_problem(record: dict[str, Any]) -> Saved:
    validators.exactly("a problem of real size", record, ["real_size"])
    validators.exactly("real_size", record["real_size"], [field.name for field in fields_of(real_size.RealSizeProblem)])
    return _SavedProblem(real_size.RealSizeProblem(**record["real_size"]))
