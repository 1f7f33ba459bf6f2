"""StepPeer: what is declared of an attention, or a wrapper, that is not this project's, in a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ring.comm.transport import Transport
from verification.peers.peer import nothing, version_of
from verification.training.step_observation import StepObservation
from verification.training.training_case import TrainingCase

Claims = Callable[[TrainingCase], TrainingCase | None]
Train = Callable[[Transport, TrainingCase], StepObservation]


@dataclass(frozen=True)
class StepPeer:
    """What takes the place of a part of the step, and the TrainingCases that it claims to support.

    name       as the report prints it
    supported  the claim in words
    claims     any drawn TrainingCase -> the nearest one of the same world that is supported, or None if there is none.
               Given a TrainingCase that it returned, it must return that one unchanged.
    train      (transport, case) -> what the rank saw: as `train_on_rank`, with the peer in its place
    worlds     the world sizes that it can be run on
    package    the name of its distribution, from which its version is read; None where there is none
    prepare    imports what `train` needs, in every process that is to run it. Raises ImportError or Refused.
    preload    modules that take long to import: the ranks come with them
    """

    name: str
    supported: str
    claims: Claims
    train: Train
    worlds: tuple[int, ...] = (2, 3, 4, 8)
    package: str | None = None
    prepare: Callable[[], None] = nothing
    preload: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """Of the installed distribution; None where there is no package, or it is not installed."""
        return version_of(self.package)


def in_dtype(case: TrainingCase, dtype: str) -> TrainingCase:
    """The TrainingCase in that dtype, in a lower one than fp64 with a model that is drawn in it: twice as wide where
    its norms would be steps."""
    if dtype != "float64" and case.model.has_steps:
        case = replace(case, model=replace(case.model, dim=2 * case.model.dim, head_dim=2 * case.model.head_dim))
    return replace(case, dtype=dtype)
