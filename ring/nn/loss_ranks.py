"""World ranks of the losses in the latest backward: a wrapper compares them with those over which it averages. None for
a loss over a model with `SameWeights`.
"""

from __future__ import annotations

import torch

_backward = -1  # torch's number of the latest backward with a loss
_found: set[frozenset[int]] = set()
_compared = False  # by a wrapper


def note(ranks: frozenset[int]) -> None:
    """Note the ranks of a loss. Called within its backward."""
    global _backward, _compared
    number = torch._C._current_graph_task_id()
    if number != _backward:
        _backward, _compared = number, False
        _found.clear()
    _found.add(ranks)


def noted(number: int) -> list[frozenset[int]]:
    """Return, for a wrapper, the ranks of the losses of the backward with torch's number, without repetitions."""
    global _compared  # noqa: PLW0603
    _compared = True
    return list(_found) if number == _backward else []


def left() -> list[frozenset[int]]:
    """Return the ranks of the losses of the latest backward, once, unless a wrapper compared them. None if another
    backward came later, whose gradients they may not be; so nor if one ran within it, as reentrant recomputation has.
    """
    found = [] if _compared or _next_backward() != _backward + 1 else list(_found)
    _found.clear()
    return found


def _next_backward() -> int:
    """Return the number that torch gives a backward now."""
    numbers: list[int] = []
    with torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        x.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        x.backward()
    return numbers[0]
