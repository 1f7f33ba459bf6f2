"""Results of a training run on a rank or in one process, and the expected ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Named = dict[str, Array]
FIRST = "step 1"


@dataclass(eq=False)
class Results:
    """Results of a run.

    data_rank   coordinate of the rank in the mesh
    logits      by micro-batch of step one: of a rank's sequences, or all (data, batch, n, vocabulary)
    losses      "step 1", ...: (); the mean over all labels of the step
    gradients   by the parameter's name, as the optimizer gets them in step one
    second      as gradients, in step two; only of a traced run
    norms       "step 1", ...: (); of all gradients together, before clipping. Empty without clipping
    start, parameters  by name: before the first step, and after the last
    after       parameters, and what the optimizer keeps of them, after each of its steps; if runs are compared
    """

    data_rank: int = 0
    _: KW_ONLY
    start: Named = field(default_factory=dict)
    logits: Named = field(default_factory=dict)
    losses: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    second: Named = field(default_factory=dict)
    norms: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    after: Named = field(default_factory=dict)

    def quantities(self) -> dict[str, Named]:
        """Return the results by quantity and name; "start" only if it was recorded."""
        names = ("logits", "losses", "gradients", "norms", "parameters")
        return {name: getattr(self, name) for name in (("start", *names) if self.start else names)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Expectation:
    """Results of the one process, and the largest allowed deviation from each, by quantity and name."""

    exact: Mapping[str, Named]
    allowed: Mapping[str, Mapping[str, float]]


def size(x: Array) -> float:
    """Return the largest |entry|; 0 for an empty array."""
    return float(np.abs(x).max(initial=0.0))


def largest(named: Named) -> float:
    """Return the largest |entry| of all arrays."""
    return max(map(size, named.values()), default=0.0)
