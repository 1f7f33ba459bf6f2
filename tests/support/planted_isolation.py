"""What calls leave in their process, planted in every rank before its first task."""

from __future__ import annotations

from typing import Any

import torch

from ring import walk
from tests.support.planted import plant


def forgets_the_pattern() -> None:
    """A plan is kept for a layout and a rank, whatever the pattern."""
    real = walk.plan_of
    found: dict[Any, Any] = {}

    def plan_of(pattern: Any, layout: Any, rank: int, *rest: Any) -> Any:
        return found.setdefault((layout, rank), real(pattern, layout, rank, *rest))

    walk.plan_of = plan_of  # type: ignore[assignment]


def keeps_results() -> None:
    kept = []

    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        kept.append(real(*args, **kwargs))
        return kept[-1]

    plant(spoil)


def seeds_random_numbers() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        torch.manual_seed(0)
        return real(*args, **kwargs)

    plant(spoil)


def sets_the_default_dtype() -> None:
    def spoil(real: Any, args: Any, kwargs: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        return real(*args, **kwargs)

    plant(spoil)
