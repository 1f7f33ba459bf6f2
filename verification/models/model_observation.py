"""Results of a run of a user's model: on a rank, and in the one process."""

from __future__ import annotations

from dataclasses import dataclass, field

from verification.models.module_trace import Entry
from verification.training.step_observation import Array

Named = dict[str, Array]


@dataclass(eq=False)
class ModelObservation:
    """Results of a run. On a rank, logits are those of its tokens, and `held` their indices in the sequence; `entries`
    are those of a ModuleTrace of step one.

    start, parameters  by name: before the first step, and after the last
    gradients        by the parameter's name, as the optimizer gets them in step one
    logits           by micro-batch of step one
    losses, norms    by step
    """

    data_rank: int = 0
    start: Named = field(default_factory=dict)
    logits: Named = field(default_factory=dict)
    losses: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    norms: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    held: list[Array] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


@dataclass(eq=False)
class ModelExpectation:
    """Results of the one process, and the largest allowed deviation from each, by quantity and name."""

    exact: dict[str, Named]
    allowed: dict[str, dict[str, float]]
    entries: list[Entry]
