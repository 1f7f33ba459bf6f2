"""Every deviation of a run, as a fraction of what is allowed: of these, and of those that seeded defects cause, a
histogram shows how many empty decades lie between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verification.search.search import Events


class Deviations:
    """Passes on what a search tells, and keeps the ratios of all examples that held."""

    def __init__(self, events: Events) -> None:
        self.covered, self.met, self.failed_again = events.covered, events.met, events.failed_again
        self._held = events.held
        self.world = 0  # of the examples that come
        self._ratios: dict[tuple[str, int, str], list[float]] = {}

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        for name, ratio in ratios.items():
            self._ratios.setdefault((name, self.world, dtype), []).append(ratio)
        self._held(dtype, ratios, seconds)

    def to_list(self) -> list[dict[str, Any]]:
        """By property, world and dtype, of those that are not exact: the ratios, to three digits, ascending."""
        return [
            {"property": name, "world": world, "dtype": dtype, "ratios": sorted(float(f"{x:.3g}") for x in ratios)}
            for (name, world, dtype), ratios in sorted(self._ratios.items())
            if any(ratios)
        ]
