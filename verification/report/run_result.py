"""RunRecord: all that a run found, counted by property, world size and dtype; and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verification.report.counter_example import CounterExample
from verification.report.coverage import Coverage

# As reports abbreviate them, in the order of the table's columns.
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class Row:
    """Examples of one property that held, their worst error as a fraction of its bound, and their wall time."""

    examples: int = 0
    worst_ratio: float = 0.0
    seconds: float = 0.0

    def add(self, other: Row) -> None:
        self.examples += other.examples
        self.worst_ratio = float(np.maximum(self.worst_ratio, other.worst_ratio))  # max() may drop a NaN
        self.seconds += other.seconds


@dataclass
class Rows:
    """All rows of a report, by (property, world size, dtype), in the order in which they were first checked."""

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
        """World sizes of one property, or of all, ascending."""
        return sorted({world for of, world, _ in self.by_key if name in (None, of)})

    def of(self, name: str | None = None, world: int | None = None) -> Summed:
        """One property or all, on one world size or all, taken together."""
        total, worst = Row(), dict[str, Row]()
        for (of, on, dtype), row in self.by_key.items():
            if name in (None, of) and world in (None, on):
                total.add(row)
                worst.setdefault(dtype, Row()).add(row)
        return Summed(total.examples, {dtype: row.worst_ratio for dtype, row in worst.items()}, total.seconds)


@dataclass(frozen=True)
class Summed:
    """Several rows taken together. worst: the worst ratio by dtype, of those that occur."""

    examples: int
    worst: dict[str, float]
    seconds: float


def finite(ratio: float | None) -> float | None:
    """The ratio for JSON, which has no NaN: None then."""
    return ratio if ratio is not None and math.isfinite(ratio) else None


@dataclass
class RunRecord:
    """What held, what failed, and what the examples covered.

    examples     checked and held, each Case or law once, however many properties were looked at
    distributed  of these, on two or more ranks
    seconds      spent on checking; starting the ranks is not counted
    coverage     of the plain Cases among the examples
    notable      lines of the summary beside the table
    extras       further fields of the JSON
    interrupted  whether this is no whole run
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
        """The record as JSON. worst_ratio: None for what is not a number, or where nothing was compared."""
        worst = self.rows.of().worst
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
            "coverage": {"cases": self.coverage.cases, "features": self.coverage.to_dict()},
            "failures": [failure.to_dict() for failure in self.failures],
            **({"interrupted": True} if self.interrupted else {}),
            **self.extras,
        }  # fmt: skip

    def add(self, other: RunRecord) -> None:
        """Take in what another part of the run found; not its seconds, which may be the same ones."""
        self.rows.add_all(other.rows)
        known = {failure.file for failure in self.failures}
        self.failures += [failure for failure in other.failures if failure.file not in known]
        self.examples, self.distributed = self.examples + other.examples, self.distributed + other.distributed
        self.coverage.add_all(other.coverage)
