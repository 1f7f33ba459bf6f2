"""The failure that is being shrunk: what it looks like, and where it is looked for.

That is the simulation, if it shows there: a hang is found there without waiting, on any number of ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from verification.failures import RankHang, VerificationFailure
from verification.run.backends import Backend
from verification.search.experiment import Counterexample, Experiment, ToolError

Signature = tuple[str, str]  # kind and property: failures that agree in both are one


def look(experiment: Experiment, place: Backend, subject: Any) -> tuple[dict[str, float], VerificationFailure | None]:
    """The ratios of a subject that holds there, or what is wrong with it. Raises ToolError for any other exception."""
    try:
        return experiment.check(place, experiment.placed(subject, place.name)), None
    except VerificationFailure as failure:
        return {}, failure
    except Exception as error:  # not the ranks' fault: no example is to be shrunk for it
        raise ToolError(f"{experiment.name}, {experiment.record_of(subject)}: {error!r}") from error


def failure_on(experiment: Experiment, place: Backend, subject: Any) -> VerificationFailure | None:
    """What is wrong with the subject on that backend, with as many ranks as the subject has."""
    place.start(experiment.case_of(subject).world)
    return look(experiment, place, subject)[1]


def signature(experiment: Experiment, found: Counterexample) -> Signature:
    return found.failure.kind, experiment.property_of(found.subject, found.failure)


@dataclass(frozen=True)
class Shrinking:
    """first: the failure as it was found. shown: the same as it shows on `place`, where it is shrunk. No smaller
    subject is tried after `deadline`, by `time.perf_counter`."""

    first: Counterexample
    shown: Counterexample
    place: Backend
    wanted: Signature
    deadline: float

    @classmethod
    def begin(
        cls,
        experiment: Experiment,
        first: Counterexample,
        backend: Backend,
        shrink_backend: Backend | None,
        budget: float,
    ) -> Shrinking:
        """On the shrink backend if the failure shows there, else on the backend on which it was found."""
        deadline = time.perf_counter() + budget
        if shrink_backend is not None:
            failure = failure_on(experiment, shrink_backend, first.subject)
            if failure is not None:
                shown = Counterexample(failure, first.subject, shrink_backend.name)
                return cls(first, shown, shrink_backend, signature(experiment, shown), deadline)
        return cls(first, first, backend, signature(experiment, first), deadline)


def is_costly(failure: VerificationFailure, place: Backend) -> bool:
    """Whether each smaller subject that fails alike costs a timeout."""
    return isinstance(failure, RankHang) and place.name != "sim"
