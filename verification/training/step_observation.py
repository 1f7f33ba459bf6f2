"""What one rank saw of a training run: made by `verification.training.rank.rank_step`, checked by `step_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(eq=False)
class PartObservation:
    """Of one of the Case's `parts`. index: of the rank in its context group.

    token_counts    how many tokens of a sequence the model's modules were given or made: the numbers that occurred
    sent, received  bytes by index in the context group; None where they are not recorded
    graph_runs      how often a compiled graph ran, forward
    """

    index: int
    token_counts: set[int] = field(default_factory=set)
    sent: dict[int, int] | None = None
    received: dict[int, int] | None = None
    graph_runs: int = 0


@dataclass(eq=False)
class StepObservation:
    """data_rank, index: where the rank stands in the mesh of the first part.

    tokens, labels  of each micro-batch of step one, (batch, tokens of this rank); positions likewise, (tokens,)
    parts           one for each of the Case's
    logits, losses, gradients, norms, parameters: as in `verification.training.dense.dense_step`; logits those of this
                    data rank alone, put together again
    not_as_clipped  the parameters whose gradients were not what a clip makes of those that are not finite
    """

    data_rank: int
    index: int
    tokens: list[Array] = field(default_factory=list)
    labels: list[Array] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)
    parts: list[PartObservation] = field(default_factory=list)
    logits: dict[str, Array] = field(default_factory=dict)
    losses: dict[str, Array] = field(default_factory=dict)
    gradients: dict[str, Array] = field(default_factory=dict)
    norms: dict[str, Array] = field(default_factory=dict)
    parameters: dict[str, Array] = field(default_factory=dict)
    not_as_clipped: list[str] = field(default_factory=list)


StepObservations = Sequence[StepObservation]
