"""RunRecord: results of a run, by property, world size and dtype, also as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verification.report.counter_example import CounterExample
from verification.report.coverage import Coverage

# Abbreviations, in the order of the table's columns.
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class Row:
    """Number of examples of one property that held, their worst error / bound, and their wall time."""

    examples: int = 0
    worst_ratio: float = 0.0
    seconds: float = 0.0

    def add(self, other: Row) -> None:
        self.examples += other.examples
        self.worst_ratio = float(np.maximum(self.worst_ratio, other.worst_ratio))  # max() may drop a NaN
        self.seconds += other.seconds


@dataclass
class Rows:
    """Rows of a report by (property, world size, dtype), in the order of the first check."""

    by_key: dict[tuple[str, int, str], Row] = field(default_factory=dict)

    def add(self, world: int, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        """Count one example that held. ratios: by property."""
        self.add_all(Rows({(name, world, dtype): Row(1, ratio, seconds) for name, ratio in ratios.items()}))

    def add_all(self, other: Rows) -> None:
        for key, row in other.by_key.items():
            self.by_key.setdefault(key, Row()).add(row)

    def properties(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.by_key))

    def worlds(self, name: str | None = None) -> list[int]:
        """Return the world sizes of one property, or of all, in ascending order."""
        return sorted({world for title, world, _ in self.by_key if name in (None, title)})

    def total(self, name: str | None = None, world: int | None = None) -> Summed:
        """Sum the rows of one property, or of all, on one world size, or on all."""
        total, worst = Row(), dict[str, Row]()
        for (title, size, dtype), row in self.by_key.items():
            if name in (None, title) and world in (None, size):
                total.add(row)
                worst.setdefault(dtype, Row()).add(row)
        return Summed(total.examples, {dtype: row.worst_ratio for dtype, row in worst.items()}, total.seconds)


@dataclass(frozen=True)
class Summed:
    """Sum of several rows. worst: the worst ratio of each dtype that occurs."""

    examples: int
    worst: dict[str, float]
    seconds: float


def finite(ratio: float | None) -> float | None:
    """Return the ratio, or None for a NaN or infinity, which JSON lacks."""
    return ratio if ratio is not None and math.isfinite(ratio) else None


@dataclass
class RunRecord:
    """Results of a run.

    examples     number that held; a Case or law counts once, for any number of properties
    distributed  number of these on two or more ranks
    seconds      of the checks, without the start of the ranks
    coverage     of the plain Cases among the examples
    notable      lines of the summary beside the table
    extras       further fields of the JSON
    interrupted  True if the run was not completed
    """

    rows: Rows = field(default_factory=Rows)
    failures: list[CounterExample] = field(default_factory=list)
    examples: int = 0
    distributed: int = 0
    seconds: float = 0.0
    coverage: Coverage = field(default_factory=Coverage)
    notable: list[str] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON. worst_ratio: None for a NaN, or where nothing was compared."""
        worst = self.rows.total().worst
        rows = [
            {
                "property": name, "world": world, "dtype": dtype, "examples": row.examples,
                "worst_ratio": finite(row.worst_ratio), "seconds": round(row.seconds, 3),
            }
            for (name, world, dtype), row in sorted(self.rows.by_key.items())
        ]  # fmt: skip
        return {
            "examples": self.examples, "distributed": self.distributed, "seconds": round(self.seconds, 3),
            "held": self.examples > 0 and not self.failures and not self.interrupted,
            "worst_ratio": {dtype: finite(worst.get(dtype)) for dtype in DTYPES},
            "rows": rows,
            "coverage": {
                "cases": self.coverage.cases, "features": self.coverage.to_dict(), "largest": self.coverage.largest,
            },
            "failures": [failure.to_dict() for failure in self.failures],
            **({"interrupted": True} if self.interrupted else {}),
            **self.extras,
        }  # fmt: skip

    def add(self, other: RunRecord) -> None:
        """Add another part of the run, without its seconds: parts may run in parallel."""
        self.rows.add_all(other.rows)
        known = {failure.file for failure in self.failures}
        self.failures += [failure for failure in other.failures if failure.file not in known]
        self.examples, self.distributed = self.examples + other.examples, self.distributed + other.distributed
        self.coverage.add_all(other.coverage)
