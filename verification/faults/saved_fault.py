"""Saved faults that were mishandled, {"fault": how, "case": ...}: importing this module makes them readable."""

from __future__ import annotations

from typing import Any

from reference import fields
from verification.faults.fault_experiment import FAULTS, premise
from verification.replay.records import read_case
from verification.replay.registry import Saved, SavedExample, register
from verification.run.backends import Backend, Unavailable


class SavedFault(SavedExample):
    """Processes are needed: a simulation has none that could be killed."""

    def prepare(self, backend: Backend) -> None:
        if backend.name != "gloo":
            raise Unavailable(f"argument --backend: faults are struck into ranks on gloo; got {backend.name}")


def read_fault(record: dict[str, Any]) -> Saved:
    """Raises ValueError for a malformed record."""
    fields.exactly("a mishandled fault", record, ["fault", "case"])
    case = read_case(record["case"])
    premise(case, record["fault"])
    return SavedFault(FAULTS, (case, record["fault"]), record)


register("fault", read_fault)
