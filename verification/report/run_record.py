"""RunRecord: all that a run found, and the same as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verification.report.counter_example import CounterExample
from verification.report.coverage import Coverage
from verification.report.row_table import DTYPES, ReportRows, finite


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

    rows: ReportRows = field(default_factory=ReportRows)
    failures: list[CounterExample] = field(default_factory=list)
    examples: int = 0
    distributed: int = 0
    seconds: float = 0.0
    coverage: Coverage = field(default_factory=Coverage)
    notable: list[str] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def worst_by_dtype(self) -> dict[str, float | None]:
        """The largest error / bound of any property; None: not a number, or nothing compared in that type."""
        worst = self.rows.of().worst
        return {dtype: finite(worst.get(dtype)) for dtype in DTYPES}

    def to_dict(self) -> dict[str, Any]:
        return {
            "examples": self.examples,
            "distributed": self.distributed,
            "seconds": round(self.seconds, 3),
            "held": self.examples > 0 and not self.failures and not self.interrupted,
            "worst_ratio": self.worst_by_dtype(),
            "rows": [
                {
                    "property": name,
                    "world": world,
                    "dtype": dtype,
                    "examples": row.examples,
                    "worst_ratio": finite(row.worst_ratio),
                    "seconds": round(row.seconds, 3),
                }
                for (name, world, dtype), row in sorted(self.rows.by_key.items())
            ],
            "coverage": {"cases": self.coverage.cases, "features": self.coverage.to_dict()},
            "failures": [failure.to_dict() for failure in self.failures],
            **({"interrupted": True} if self.interrupted else {}),
            **self.extras,
        }

    def add(self, other: RunRecord) -> None:
        """What another run found, or another part of this one; not its seconds, which may be the same ones."""
        self.rows.add_all(other.rows)
        known = {failure.file for failure in self.failures}
        self.failures += [failure for failure in other.failures if failure.file not in known]
        self.examples, self.distributed = self.examples + other.examples, self.distributed + other.distributed
        self.coverage.add_all(other.coverage)
