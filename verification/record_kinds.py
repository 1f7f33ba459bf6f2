"""Kinds of saved records, the one writer of records, and their first reader.

{"kind": "law", "law": title, "case": a Case, "how": its change}: a record holds its kind, names, a case and perhaps how
that is changed. A "case" has the fields of a Case beside its kind. Records of 0.1.0 have no kind: their fields tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reference import validators


@dataclass(frozen=True)
class RecordKind:
    """Fields of a kind of record.

    title      in errors
    names      fields that name what runs or judges the case
    case       field of the case; "" if its fields are those of the record
    how        field of a change or a fault of the case
    simulated  True if it may be replayed in a simulation
    attention  kind of the record with an attention or model of the command line; None: it takes none
    """

    title: str
    names: tuple[str, ...] = ()
    case: str = "case"
    how: str = ""
    simulated: bool = False
    attention: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.names, self.case, self.how)))

    @property
    def marks(self) -> tuple[str, ...]:
        """Fields that tell the kind of a record that does not say it."""
        return self.names or tuple(filter(None, (self.how or self.case,)))


# A record that does not say its kind is of the first one whose marks it has: of a "case" if it has none.
KINDS = {
    "peer law": RecordKind("a counter-example of a law with a peer", ("peer", "law"), how="how", attention="peer law"),
    "peer": RecordKind("a counter-example of a peer", ("peer",), attention="peer"),
    "step peer": RecordKind(
        "a counter-example of a peer in a training step", ("step_peer",), "training_case", attention="step peer"
    ),
    "server": RecordKind("a counter-example of a server", ("server",), attention="server"),
    "model": RecordKind("a counter-example of a model", ("model",), attention="model"),
    "law": RecordKind("a counter-example of a law", ("law",), how="how", simulated=True, attention="peer law"),
    "fault": RecordKind("a mishandled fault", how="fault"),
    "training": RecordKind("a counter-example of a training step", case="training"),
    "real size": RecordKind("a problem of real size", case="real_size", simulated=True),
    "links": RecordKind("links between ranks", case="links", attention="links"),
    "long": RecordKind("a long problem", case="long", attention="long"),
    "case": RecordKind("a Case", case="", simulated=True, attention="peer"),
}
# Fields that may name a user's own module, and the option that names it again: a file alone imports nothing.
OPTIONS = {"peer": "--attention", "step_peer": "--attention", "model": "--model", "server": "--server"}


@dataclass(frozen=True)
class Record:
    """A record, taken apart. Its parts are of JSON types. names: by field. before: records of examples that run first;
    None: the failure needed some that are not known."""

    kind: str
    case: Any
    how: Any = None
    names: Mapping[str, Any] = field(default_factory=dict)
    before: Any = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that is saved."""
        fields = KINDS[self.kind]
        case = {fields.case: self.case} if fields.case else self.case
        how = {fields.how: self.how} if fields.how else {}
        before = {} if self.before == () else {"before": self.before}
        return {"kind": self.kind, **self.names, **case, **how, **before}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Record:
        """Take a record apart. Raises ValueError for an unknown kind, or other fields than it has."""
        kind, before = kind_of(record), record.get("before", ())
        data = {name: value for name, value in record.items() if name not in ("kind", "before")}
        fields = KINDS[kind]
        if not fields.case:
            return cls(kind, data, before=before)
        validators.exactly(fields.title, data, fields.fields)
        return cls(kind, data[fields.case], data.get(fields.how), {name: data[name] for name in fields.names}, before)


def kind_of(record: Mapping[str, Any]) -> str:
    """Return the kind of a record, from its fields if it does not say it. Raises ValueError for an unknown one."""
    if "kind" in record:
        return validators.choice("kind", record["kind"], KINDS)
    return next(name for name, fields in KINDS.items() if set(fields.marks) <= set(record))
