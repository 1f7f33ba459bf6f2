"""Drawing as searches do."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from verification.search.search import RUN

QUIET = settings(database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=(HealthCheck.too_slow,))
Item = TypeVar("Item")


def draw_many(strategy: st.SearchStrategy[Item], count: int) -> list[Item]:
    """Draw `count` items, the same every time. Short runs draw as searches do: a long one repeats itself."""
    drawn: list[Item] = []
    for run in range(-(-count // RUN)):

        @seed(run)
        @settings(QUIET, max_examples=RUN)
        @given(strategy)
        def collect(item: Item) -> None:
            drawn.append(item)

        collect()
    return drawn[:count]
