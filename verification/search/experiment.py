"""An experiment: what Hypothesis draws, how one subject is checked, and how a failing one is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis.strategies import SearchStrategy

from verification.case import Case
from verification.check.properties import broken_by
from verification.check.supported import fused_on_gpus
from verification.failures import VerificationFailure
from verification.protocols import Example
from verification.run.backends import Backend


class ToolError(BaseException):
    """The machinery itself failed on an example. No `Exception`, so that Hypothesis lets it through at once."""


def case_record(case: Case) -> dict[str, Any]:
    """A Case as JSON has it."""
    data: dict[str, Any] = json.loads(case.to_json())
    return data


def on_device(case: Case, device: str) -> Case:
    """The Case there, with kernel "auto" in place of a fused one that does not exist there, or does not take it."""
    there = case.kernel != "cudnn" and (case.kernel != "flash" or fused_on_gpus(case) or device == "cpu")
    return replace(case, device=device, kernel=case.kernel if there else "auto")


@dataclass(frozen=True)
class Experiment:
    """Something that Hypothesis draws subjects for: by default a subject is a Case, and a failure breaks one of the
    properties of `verification.check.properties`.

    draw          by world size: a strategy of subjects
    check         by title of a property or law: worst error / bound; raises VerificationFailure
    case_of       a subject's Case, or what takes its place (`verification.protocols.Example`)
    with_case     a subject with another Case in place of its own
    moved         a Case as it runs on the device "cpu" or "cuda"
    record_of     what of a subject is saved, and replayed
    property_of   of a subject and its failure: the title of what is broken
    pushes        whether Hypothesis is to look for larger errors: it then draws around what had the largest
    on_fewer      whether a failure is looked for on fewer real processes, too; in a simulation it always is
    fewest_ranks  on which there is anything to draw
    premise       raises ValueError for a subject that could not be drawn, so that one with less in it can be tried
                  (`verification.search.simplify`). None: nothing is left out of subjects
    """

    name: str
    draw: Callable[[int], SearchStrategy[Any]]
    check: Callable[[Backend, Any], dict[str, float]]
    case_of: Callable[[Any], Any] = lambda subject: subject
    with_case: Callable[[Any, Any], Any] = lambda subject, case: case
    moved: Callable[[Any, str], Any] = on_device
    record_of: Callable[[Any], dict[str, Any]] = case_record
    property_of: Callable[[Any, VerificationFailure], str] = lambda subject, failure: broken_by(failure)
    targets_error: bool = False
    on_fewer: bool = False
    fewest_ranks: int = 1
    premise: Callable[[Any], None] | None = None

    def placed(self, subject: Any, backend: str) -> Any:
        """The subject as it runs on the backend of that name: on GPUs for "nccl", else on the CPU."""
        case: Example = self.case_of(subject)
        device = "cuda" if backend == "nccl" else "cpu"
        return subject if case.device == device else self.with_case(subject, self.moved(case, device))


@dataclass(frozen=True)
class Counterexample:
    """A failure, the subject that shows it, and the name of the backend on which it does."""

    failure: VerificationFailure
    subject: Any
    backend: str
