"""Collects every deviation of a run as a fraction of the allowed one. A histogram of these, and of the deviations that
seeded defects cause, shows how many empty decades lie between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verification.search.search import Events


class Deviations:
    """Forwards the events of a search, and stores the ratios of all examples that held."""

    def __init__(self, events: Events) -> None:
        self.covered, self.met, self.failed_again = events.covered, events.met, events.failed_again
        self._held = events.held
        self.world = 0  # world size of the next examples
        self._ratios: dict[tuple[str, int, str], list[float]] = {}

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        for name, ratio in ratios.items():
            self._ratios.setdefault((name, self.world, dtype), []).append(ratio)
        self._held(dtype, ratios, seconds)

    def to_list(self) -> list[dict[str, Any]]:
        """Ratios by property, world and dtype, to three digits, ascending; properties that are exact are left out."""
        return [
            {"property": name, "world": world, "dtype": dtype, "ratios": sorted(float(f"{x:.3g}") for x in ratios)}
            for (name, world, dtype), ratios in sorted(self._ratios.items())
            if any(ratios)
        ]
