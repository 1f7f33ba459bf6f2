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
    experiment: Experiment, place: Backend, subject: Any
) -> tuple[dict[str, float], VerificationFailure | None]:
    """Return the ratios of a subject that holds, or its failure. Raises ToolError for any other exception."""
    try:
        return experiment.check(place, experiment.placed(subject, place.name)), None
    except VerificationFailure as failure:
        return {}, failure
    except Exception as error:  # a fault of the tool: do not shrink it
        raise ToolError(f"{experiment.name}, {experiment.record_of(subject)}: {error!r}") from error


def failure_on(experiment: Experiment, place: Backend, subject: Any) -> VerificationFailure | None:
    """Return the failure of the subject on that backend, with the subject's world size; None if it holds."""
    place.start(experiment.case_of(subject).world)
    return check_subject(experiment, place, subject)[1]


def signature(experiment: Experiment, example: FoundFailure) -> Signature:
    return example.failure.kind, experiment.property_of(example.subject, example.failure)


@dataclass(frozen=True)
class Shrinking:
    """A failure being shrunk. first: the original failure. shown: the same failure on `place`, where it is shrunk.
    expected: its signature. No smaller subject is tried after `deadline` (`time.perf_counter`)."""

    first: FoundFailure
    shown: FoundFailure
    place: Backend
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


def is_costly(failure: VerificationFailure, place: Backend) -> bool:
    """Return True if each smaller subject that fails in the same way costs a timeout."""
    return isinstance(failure, RankHang) and place.name != "sim"
