"""An experiment: the strategy of its subjects, their check, and their record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis.strategies import SearchStrategy

from verification.case import GPU_KERNELS, TILE, Case
from verification.check.properties import broken_by
from verification.check.supported import fused
from verification.failures import VerificationFailure, WrongResult
from verification.protocols import CaseLike
from verification.record_kinds import KINDS, Record
from verification.run.backends import Backend, Preparation


class ToolError(BaseException):
    """Failure of the tool itself on an example. Not an `Exception`, so that Hypothesis passes it on at once."""


def on_device(case: Case, device: str) -> Case:
    """Return the Case on that device, with kernel "auto" in place of a fused one that the device or Case rules out, and
    with chunks and buckets that the device takes."""
    if case.same_bits is not None and (rest := -case.same_bits % TILE[device]):
        chunk = case.same_bits + rest
        bucket = None if case.bucket is None else max(case.bucket, chunk)
        case = case.lengthened(max(case.tokens, 3 * chunk), same_bits=chunk, bucket=bucket)
    moved = replace(case, device=device)
    ruled_out = case.kernel in GPU_KERNELS or (case.kernel == "flash" and not fused(moved, "flash"))
    return replace(moved, kernel="auto") if ruled_out else moved


@dataclass(frozen=True)
class Experiment:
    """A strategy of subjects with their check. A subject is a Case, or another `verification.protocols.CaseLike`; or,
    if the kind of its record has a `how`, a pair of both. By default a failure breaks a property of
    `verification.check.properties`.

    draw          strategy of subjects, by world size
    check         worst error / bound, by title of the property or law; raises VerificationFailure
    moved         the Case on the device "cpu" or "cuda"
    kind, names   of the records of its subjects (`verification.record_kinds`)
    property_of   title of the property or law that a failure of the subject breaks
    targets_error True if Hypothesis should draw around the subjects with the largest errors
    on_fewer      True if failures are searched for on fewer real processes, too; in a simulation they always are
    fewest_ranks  smallest world size with subjects
    validate      raises ValueError for a subject that cannot be drawn: it validates simpler subjects
                  (`verification.search.simplify`). None: subjects are not simplified
    without_subjects what to say where the strategy, by a peer's claim, draws none
    explain       cause of a wrong result in words, from the failure, the backend, the shrunk subject and the first one;
                  None if it finds none. None: causes are not searched for
    timeout       least number of seconds for an example
    preload       modules that ranks import first; (): those of the backend
    prepare_rank  called first in every rank; None: as the backend has it
    calls         what failures say that the ranks were in; None: the name of the function
    """

    name: str
    draw: Callable[[int], SearchStrategy[Any]]
    check: Callable[[Backend, Any], dict[str, float]]
    moved: Callable[[Any, str], Any] = on_device
    kind: str = "case"
    names: Mapping[str, str] = field(default_factory=dict)
    property_of: Callable[[Any, VerificationFailure], str] = lambda subject, failure: broken_by(failure)
    targets_error: bool = False
    on_fewer: bool = False
    fewest_ranks: int = 1
    validate: Callable[[Any], None] | None = None
    explain: Callable[[WrongResult, Backend, Any, Any], str | None] | None = None
    without_subjects: str = ""
    timeout: float = 0.0
    preload: tuple[str, ...] = ()
    prepare_rank: Preparation | None = None
    calls: str | None = None

    def case_of(self, subject: Any) -> Any:
        """Return the Case of a subject."""
        return subject[0] if KINDS[self.kind].how else subject

    def with_case(self, subject: Any, case: Any) -> Any:
        """Return the subject with another Case."""
        return (case, subject[1]) if KINDS[self.kind].how else case

    def record_of(self, subject: Any) -> dict[str, Any]:
        """Return the record of a subject, which is saved and replayed."""
        how = subject[1] if KINDS[self.kind].how else None
        return Record(self.kind, self.case_of(subject).to_dict(), how, self.names).to_dict()

    def prepare(self, backend: Backend) -> None:
        """Give a backend what ranks of these subjects need, before it starts."""
        backend.timeout, backend.preload = max(backend.timeout, self.timeout), self.preload or backend.preload
        backend.prepare, backend.calls = self.prepare_rank or backend.prepare, self.calls or backend.calls

    def placed(self, subject: Any, device: str) -> Any:
        """Return the subject on that device: "cpu" or "cuda"."""
        case: CaseLike = self.case_of(subject)
        return subject if case.device == device else self.with_case(subject, self.moved(case, device))

    def add_cause(self, failure: VerificationFailure, backend: Backend, subject: Any, first: Any) -> None:
        """Add the cause of a wrong result, if `explain` finds it, as a note (PEP 678), on a backend that has the world
        size of the subject."""
        if isinstance(failure, WrongResult) and self.explain:
            if cause := self.explain(failure, backend, subject, first):
                failure.add_note(cause)


PastExample = tuple[Experiment, Any]  # a subject that ran, and its experiment


@dataclass(frozen=True)
class FoundFailure:
    """A failure, the subject that shows it, and the name of the backend on which it does.

    earlier  latest calls on its ranks before it
    before   calls that must precede it on new ranks (`verification.search.history`); None: they are not known
    """

    failure: VerificationFailure
    subject: Any
    backend: str
    earlier: tuple[PastExample, ...] = ()
    before: tuple[PastExample, ...] | None = ()
