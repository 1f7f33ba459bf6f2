"""State of the shrinking of a failure: its signature, and the backend on which smaller subjects run.

That is the simulation if the failure shows there: it detects a hang without a timeout, on any number of ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from verification.failures import RankHang, VerificationFailure
from verification.run.backends import Backend
from verification.search.experiment import Experiment, FoundFailure, ToolError

Signature = tuple[str, str]  # (kind, property): failures that agree in both are duplicates


def check_subject(
    experiment: Experiment, backend: Backend, subject: Any
) -> tuple[dict[str, float], VerificationFailure | None]:
    """Return the ratios of a subject that holds, or its failure. Raises ToolError for any other exception."""
    backend.earlier.append((experiment, subject))
    try:
        return experiment.check(backend, experiment.placed(subject, backend.device)), None
    except VerificationFailure as failure:
        return {}, failure
    except Exception as error:  # a fault of the tool: do not shrink it
        raise ToolError(f"{experiment.name}, {experiment.record_of(subject)}: {error!r}") from error


def failure_on(experiment: Experiment, backend: Backend, subject: Any) -> VerificationFailure | None:
    """Return the failure of the subject on that backend, with the subject's world size; None if it holds."""
    backend.start(experiment.case_of(subject).world)
    return check_subject(experiment, backend, subject)[1]


def signature(experiment: Experiment, counterexample: FoundFailure) -> Signature:
    return counterexample.failure.kind, experiment.property_of(counterexample.subject, counterexample.failure)


@dataclass(frozen=True)
class Shrinking:
    """A failure being shrunk. first: the original failure. shown: the same failure on `backend`, where it is shrunk.
    expected: its signature. No smaller subject is tried after `deadline` (`time.perf_counter`)."""

    first: FoundFailure
    shown: FoundFailure
    backend: Backend
    expected: Signature
    deadline: float

    @classmethod
    def begin(
        cls,
        experiment: Experiment,
        first: FoundFailure,
        backend: Backend,
        shrink_backend: Backend | None,
        budget: float,
    ) -> Shrinking:
        """Begin on the shrink backend if the failure shows there, else on the original backend."""
        deadline = time.perf_counter() + budget
        if shrink_backend is not None:
            failure = failure_on(experiment, shrink_backend, first.subject)
            if failure is not None:
                shown = FoundFailure(failure, first.subject, shrink_backend.name)
                return cls(first, shown, shrink_backend, signature(experiment, shown), deadline)
        return cls(first, first, backend, signature(experiment, first), deadline)


def is_costly(failure: VerificationFailure, backend: Backend) -> bool:
    """Return True if each smaller subject that fails in the same way costs a timeout."""
    return isinstance(failure, RankHang) and backend.name != "sim"
