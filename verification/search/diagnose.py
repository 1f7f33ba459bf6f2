"""Diagnosis of a failure in the simulation.

Over gloo or NCCL, a receive buffer that is read before its wait gives a wrong result, an overlong message kills its
receiver, and a cyclic wait hangs. The same subject may fail in the simulation with the cause.
"""

from __future__ import annotations

from typing import Any

from verification.failures import RankFailure, VerificationFailure, WrongResult
from verification.run.backends import SimBackend
from verification.run.simulation.eager_delivery import DeliveryPolicy, Route
from verification.search.experiment import Experiment
from verification.search.shrinking import check_subject, failure_on


def cause_in(simulation: SimBackend, experiment: Experiment, subject: Any, failure: VerificationFailure) -> str | None:
    """Return a sentence on the cause of the failure; None if the simulation shows no more than the failure. Raises
    ToolError."""
    simulated = failure_on(experiment, simulation, subject)
    if isinstance(simulated, WrongResult):
        early = read_too_early(simulation, experiment, subject)
        return None if early is None else f"in the simulation: {early}"
    if isinstance(simulated, RankFailure) and simulated.headline != getattr(failure, "headline", None):
        return f"in the simulation, {simulated.kind}: {simulated.headline}"
    return None


def read_too_early(simulation: SimBackend, experiment: Experiment, subject: Any) -> str | None:
    """Name the receive buffer that is read before its wait; None if there is none. The subject holds if all messages
    arrive at once, and fails if this one is delayed until its wait: bisection finds it."""
    names: dict[Route, str] = {}

    def wrong_with(late: list[Route]) -> bool:
        simulation.delivery = DeliveryPolicy(frozenset(late))
        failure = check_subject(experiment, simulation, subject)[1]
        names.update(simulation.delivery.received)
        return isinstance(failure, WrongResult)

    try:
        simulation.delivery = DeliveryPolicy()
        if check_subject(experiment, simulation, subject)[1] is not None:
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
        return f"rank {reader} reads the receive buffer of {names[route]} before that message was waited for"
    finally:
        simulation.delivery = None
