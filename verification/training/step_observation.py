"""Results of one rank in a training run: made by `verification.training.rank.rank_step`, checked by `step_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verification.models.results import Array, Results


@dataclass(eq=False)
class PartObservation:
    """Results of one of the Case's `parts`. index: of the rank in its context group.

    token_counts    token dimensions that occurred in inputs and outputs of the model's modules
    sent, received  bytes by index in the context group; None if messages are not recorded
    graph_runs      number of forward runs of compiled graphs
    """

    index: int
    token_counts: set[int] = field(default_factory=set)
    sent: dict[int, int] | None = None
    received: dict[int, int] | None = None
    graph_runs: int = 0


@dataclass(eq=False)
class StepObservation(Results):
    """Results of a whole run. index: with data_rank the coordinates of the rank in the mesh of the first part.

    tokens, labels  for each micro-batch of step one, (batch, tokens of this rank); positions: (tokens,)
    parts           one for each of the Case's
    wrongly_clipped parameters whose non-finite gradients were clipped otherwise than torch clips them
    """

    index: int = 0
    tokens: list[Array] = field(default_factory=list)
    labels: list[Array] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)
    parts: list[PartObservation] = field(default_factory=list)
    wrongly_clipped: list[str] = field(default_factory=list)


StepObservations = Sequence[StepObservation]
