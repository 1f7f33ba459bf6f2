"""Readers of saved counter-examples. A file may have been edited, or come from elsewhere, so every field is validated.

They refuse Cases that `ring_attention` does not support, laws with invalid arguments, and sizes that no run draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from verification.replay.registry import OWN_ADAPTERS, READERS, Saved, SavedExample
from verification.report.report import Report
from verification.run.backends import MAX_RANKS, Backend

_LIMITS = {
    "world": max(MAX_RANKS.values()), "tokens": 2**17, "batch": 2**12, "heads": 2**12, "kv_heads": 2**12,
    "head_dim": 2**12, "value_dim": 2**12, "bucket": MAX_INTEGER,
}  # fmt: skip


def parse(record: object, attention: str | None = None) -> Saved:
    """Return the counter-example of a JSON record.

    Args:
        record: as saved.
        attention: name of a peer, or of a Setup of a model, that runs it in place of the one that the record names.

    Raises:
        ValueError: no counter-example; or one of a user's own module, which only `attention` may name, since data
            imports nothing.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a counter-example must be a JSON object, got {type(record).__name__}")
    if "before" in record:
        return _after(record["before"], {name: x for name, x in record.items() if name != "before"}, attention)
    if attention is not None:
        record = _with_attention(record, attention)
    for field, option in (("peer", "--attention"), ("step_peer", "--attention"), ("model", "--model")):
        name = record.get(field)
        if attention is None and isinstance(name, str) and ":" in name and not name.startswith(OWN_ADAPTERS):
            raise ValueError(
                f"{field} is {name!r}, and a replay imports no module that a file names; if it is yours, "
                f"write {option} {name}"
            )
    reader = next((name for field, name in READERS.items() if field in record), None)
    return SavedExample(EXAMPLES, read_own_case(record), record) if reader is None else resolve_name(reader)(record)


def _after(before: object, record: dict[str, Any], attention: str | None) -> Saved:
    """Return the counter-example of the record with the examples before it, None where these are not known."""
    saved = parse(record, attention)
    if not (before is None or isinstance(before, list)) or not isinstance(saved, SavedExample):
        raise ValueError("before must be null, or a list of examples, in the record of an example")
    examples = [parse(example, attention) for example in before or ()]
    earlier = tuple(x for x in examples if isinstance(x, SavedExample) and x.before == () and x.world == saved.world)
    if len(earlier) < len(examples):
        raise ValueError(f"an entry of before must be an example on {saved.world} ranks, without a before")
    return replace(saved, before=None if before is None else earlier, record=saved.record | {"before": before})


def _with_attention(record: dict[str, Any], attention: str) -> dict[str, Any]:
    """Return the record with that attention. Raises ValueError for one of a kind that no other attention can run."""
    if "model" in record:
        return record | {"model": attention}
    if "step_peer" in record:
        return record | {"step_peer": attention}
    if "peer" in record or "law" in record:
        return record | {"peer": attention}
    if not any(field in record for field in READERS):
        return {"peer": attention, "case": record}
    kind = next(field for field in READERS if field in record)
    raise ValueError(f"it is a counter-example with the field {kind!r}, which --attention cannot run")


def read_own_case(data: object) -> Case:
    """Return the Case of a record that this project's own attention runs. Raises ValueError."""
    case = read_case(data)
    if not case.backward:
        raise ValueError("backward is False; it must be True: only peers run forward alone")
    return case


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
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"law is {name!r}; it must be one of {', '.join(known)}")
    case = read_own_case(record["case"])
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
