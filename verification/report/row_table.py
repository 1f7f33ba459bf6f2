"""What held, counted by property, world size and dtype: examples, the worst error as a fraction of its bound, time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

# As reports abbreviate them, in the order of the table's columns.
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class Row:
    """One property on one world size in one dtype. `seconds` is wall time of the examples it was checked on."""

    examples: int = 0
    worst_ratio: float = 0.0
    seconds: float = 0.0

    def add(self, ratio: float, seconds: float) -> None:
        self.examples += 1
        self.worst_ratio = float(np.maximum(self.worst_ratio, ratio))  # a NaN stays visible, which max() may drop
        self.seconds += seconds


@dataclass
class ReportRows:
    """All rows of a report, by (property, world size, dtype)."""

    by_key: dict[tuple[str, int, str], Row] = field(default_factory=dict)

    def add(self, world: int, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        """One example that held. ratios: by property."""
        for name, ratio in ratios.items():
            self.by_key.setdefault((name, world, dtype), Row()).add(ratio, seconds)

    def add_all(self, other: ReportRows) -> None:
        for key, row in other.by_key.items():
            mine = self.by_key.setdefault(key, Row())
            mine.examples, mine.seconds = mine.examples + row.examples, mine.seconds + row.seconds
            mine.worst_ratio = float(np.maximum(mine.worst_ratio, row.worst_ratio))

    def properties(self) -> list[str]:
        """In the order in which they were first checked."""
        return list(dict.fromkeys(name for name, _, _ in self.by_key))

    def worlds(self, name: str | None = None) -> list[int]:
        """Ascending; of all properties, or one."""
        return sorted({world for of, world, _ in self.by_key if name in (None, of)})

    def of(self, name: str | None = None, world: int | None = None) -> Summed:
        """Of one property or all, on one world size or all, taken together."""
        return summed(self._chosen(name, world))

    def _chosen(self, name: str | None, world: int | None) -> Iterator[tuple[str, Row]]:
        for (of, on, dtype), row in self.by_key.items():
            if name in (None, of) and world in (None, on):
                yield dtype, row


@dataclass(frozen=True)
class Summed:
    """Several rows taken together. worst: by dtype, of those that occur; NaN is the largest of all."""

    examples: int
    worst: dict[str, float]
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether nothing deviated at all."""
        return not any(self.worst.values())


def summed(rows: Iterable[tuple[str, Row]]) -> Summed:
    """rows: (dtype, row)."""
    examples, seconds, worst = 0, 0.0, dict[str, float]()
    for dtype, row in rows:
        examples, seconds = examples + row.examples, seconds + row.seconds
        worst[dtype] = float(np.maximum(worst.get(dtype, 0.0), row.worst_ratio))
    return Summed(examples, worst, seconds)


def finite(ratio: float | None) -> float | None:
    """For JSON, which has no NaN: None then."""
    return ratio if ratio is not None and math.isfinite(ratio) else None
