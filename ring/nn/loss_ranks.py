"""World ranks of the losses in the backward that runs: a wrapper compares them with those over which it averages. None
for a loss over a model with `SameWeights`.
"""

from __future__ import annotations

import torch

_backward = -1  # torch's number of the latest backward with a loss
_found: set[frozenset[int]] = set()


def note(ranks: frozenset[int]) -> None:
    """Note the ranks of a loss. Called within its backward."""
    global _backward  # noqa: PLW0603, torch runs one backward at a time
    number = torch._C._current_graph_task_id()
    if number != _backward:
        _backward = number
        _found.clear()
    _found.add(ranks)


def noted(number: int) -> list[frozenset[int]]:
    """Return the ranks of the losses of the backward with torch's number, without repetitions."""
    return list(_found) if number == _backward else []
