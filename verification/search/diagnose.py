"""What the simulation says of a failure that was found elsewhere, or that it sees as wrong numbers only.

Over gloo or NCCL, a receive buffer that is read before its message was waited for gives a wrong result, a message that
is too long ends its receiver, and ranks that wait in a circle hang. The same subject in the simulation may tell why.
"""

from __future__ import annotations

from typing import Any

from verification.failures import RankFailure, VerificationFailure, WrongResult
from verification.run.backends import SimBackend
from verification.run.simulation.eager_delivery import DeliveryPolicy, Route
from verification.search.experiment import Experiment
from verification.search.shrinking import failure_on, look


def cause_in(simulation: SimBackend, experiment: Experiment, subject: Any, failure: VerificationFailure) -> str | None:
    """A sentence on the cause of the failure, where the simulation knows more of it than the failure says. Raises
    what `look` raises."""
    seen = failure_on(experiment, simulation, subject)
    if isinstance(seen, WrongResult):
        early = read_too_early(simulation, experiment, subject)
        return None if early is None else f"in the simulation: {early}"
    if isinstance(seen, RankFailure) and seen.headline != getattr(failure, "headline", None):
        return f"in the simulation, {seen.kind}: {seen.headline}"
    return None


def read_too_early(simulation: SimBackend, experiment: Experiment, subject: Any) -> str | None:
    """Which receive buffer is read before its message was waited for, in words; None if it cannot be told. The subject
    holds with all messages arriving at once, and is wrong with that one held back until its wait: found by halving."""
    met: dict[Route, str] = {}

    def wrong_with(late: list[Route]) -> bool:
        simulation.delivery = DeliveryPolicy(frozenset(late))
        failure = look(experiment, simulation, subject)[1]
        met.update(simulation.delivery.received)
        return isinstance(failure, WrongResult)

    try:
        simulation.delivery = DeliveryPolicy()
        if look(experiment, simulation, subject)[1] is not None:
            return None
        suspects = list(simulation.delivery.received)
        if not wrong_with(suspects):
            return None
        while len(suspects) > 1:
            first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
            suspects = first if wrong_with(first) else second
        (route,) = suspects
        reader = experiment.case_of(subject).ranks[route[1]]
        if not wrong_with(suspects):
            return None
        return f"rank {reader} reads the receive buffer of {met[route]} before that message was waited for"
    finally:
        simulation.delivery = None
