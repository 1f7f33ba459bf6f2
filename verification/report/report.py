"""What a run says while it goes and when it ends: live progress, the table, failures, and the same as JSON.

On a terminal the progress is a live table of the world size in work; elsewhere it is one plain line every few
seconds, free of control codes, so that logs stay readable.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from verification.failures import RankHang, VerificationFailure
from verification.report.coverage import FEATURES, Coverage
from verification.wording import counted

DTYPES = ("float64", "float32", "bfloat16", "float16")
LINE_EVERY = 5.0  # seconds between progress lines where the output is not a terminal
DRAW_EVERY = 0.5  # seconds between drawings of the live table


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


@dataclass(frozen=True)
class Failure:
    """One counter-example: its kind, the record that replays it, and what was seen in words."""

    kind: str
    broken: str  # title of the property or law
    world: int
    record: Mapping[str, Any]  # the Case as JSON has it; for a law, what else it takes as well
    file: Path
    message: str
    backend: str = "gloo"  # on which it shows

    @property
    def replay(self) -> str:
        place = [] if self.backend == "gloo" else ["--backend", self.backend]
        return shlex.join([sys.executable, "-m", "verification", "replay", *place, str(self.file.resolve())])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Failure:
        """What `to_dict` made. Raises KeyError, TypeError, ValueError for what it did not."""
        line = shlex.split(_text("replay", data["replay"]))
        if not line:
            raise ValueError("replay is ''; it must be the line that replays the failure")
        kind, broken, message, backend = (
            _text(name, data[name]) for name in ("kind", "property", "message", "backend")
        )
        return cls(kind, broken, whole("world", data["world"], 1), dict(data["case"]), Path(line[-1]), message, backend)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "property": self.broken,
            "world": self.world,
            "backend": self.backend,
            "case": dict(self.record),
            "replay": self.replay,
            "message": self.message,
        }


@dataclass
class Report:
    """Collects rows and failures and shows them. Use as a context manager around the examples."""

    console: Console
    rows: dict[tuple[str, int, str], Row] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    examples: int = 0  # checked and held, each Case or law once, however many properties were looked at
    distributed: int = 0  # of these, on two or more ranks
    seconds: float = 0.0  # spent on checking; starting the ranks is not counted
    coverage: Coverage = field(default_factory=Coverage)  # what the plain Cases among the examples had
    extras: dict[str, Any] = field(default_factory=dict)  # further fields of the JSON
    interrupted: bool = False  # whether this is no whole run
    _world: int = 0
    _goal: int = 0
    _done: int = 0
    _alike: int = 0
    _worst: float = 0.0
    _failed_before: int = 0
    _open: bool = False  # between `start_world` and `end_world`
    _since: float = 0.0
    _shown: float = 0.0
    _live: Live | None = None

    def __enter__(self) -> Report:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start_world(self, world: int, goal: int) -> None:
        """From now on examples are on that world size; `goal` of them are planned."""
        self._world, self._goal, self._done, self._alike = world, goal, 0, 0
        self._failed_before, self._worst, self._open = len(self.failures), 0.0, True
        self._since = self._shown = time.perf_counter()

    def end_world(self, what: str = "examples") -> float:
        """Sums up since `start_world`; returns the seconds that passed."""
        spent = time.perf_counter() - self._since
        self.seconds += spent
        self._open = False
        found = f", {counted(len(self.fresh), 'counter-example')}" if self.fresh else ""
        found += f" ({counted(self._alike, 'more example')} failed in the same way)" if self._alike else ""
        rate = f", {self._done / spent:.0f}/s" if self._done > 1 else ""
        done = f"{counted(self._done, 'example')} held" if self._done or not self.fresh else "no example held"
        self.say(f"world {self._world}, {what}: {done} in {spent:.1f} s{rate}{found}")
        return spent

    def interrupt(self) -> None:
        """The run ends here, before its time: sums up what was under way."""
        self.interrupted = True
        if self._open:
            self.end_world("interrupted")

    def held(self, dtype: str, ratios: Mapping[str, float], seconds: float) -> None:
        """An example held: by property, its worst error as a fraction of the bound (0 for an exact check)."""
        for name, ratio in ratios.items():
            self.rows.setdefault((name, self._world, dtype), Row()).add(ratio, seconds)
        self.examples += 1
        self.distributed += self._world > 1
        self._done += 1
        self._worst = float(np.max([self._worst, *ratios.values()]))  # np.max keeps a NaN
        self._progress()

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.say(f"[bold red]counter-example[/] {failure.kind}: {failure.broken}, world {failure.world}")

    def failed_again(self) -> None:
        """An example failed as one did that was reported: it is counted, and passed over."""
        self._alike += 1

    @property
    def fresh(self) -> list[Failure]:
        """The failures since `start_world`."""
        return self.failures[self._failed_before :]

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def _progress(self) -> None:
        now = time.perf_counter()
        if now - self._shown < (DRAW_EVERY if self._live else LINE_EVERY):
            return
        self._shown = now
        if self._live:
            self._live.update(self._progress_table(now), refresh=True)
        else:
            self.say(
                f"world {self._world}: {self._done}/{counted(self._goal, 'example')}, "
                f"{self._done / (now - self._since):.0f}/s, worst error / bound {self._worst:.3f}"
            )

    def _progress_table(self, now: float) -> Table:
        spent = now - self._since
        goal = counted(self._goal, "example")
        table = Table(title=f"world {self._world}: {self._done} of {goal}, {self._done / spent:.0f}/s")
        for head in ("property", "examples", "examples/s", "worst error / bound"):
            table.add_column(head, justify="left" if head == "property" else "right")
        for name, rows in self._by_property(self._world).items():
            count = sum(row.examples for row in rows.values())
            worst = max(row.worst_ratio for row in rows.values())
            table.add_row(name, str(count), f"{count / spent:.0f}", _ratio(worst))
        return table

    def _by_property(self, world: int) -> dict[str, dict[str, Row]]:
        found: dict[str, dict[str, Row]] = {}
        for (name, of, dtype), row in self.rows.items():
            if of == world:
                found.setdefault(name, {})[dtype] = row
        return found

    def worst_by_dtype(self) -> dict[str, float | None]:
        """The largest error / bound of any property; None: not a number, or nothing compared in that type."""
        found = {}
        for dtype in DTYPES:
            ratios = [row.worst_ratio for (_, _, of), row in self.rows.items() if of == dtype]
            worst = float(np.max(ratios)) if ratios else math.nan
            found[dtype] = worst if math.isfinite(worst) else None
        return found

    def summary(self) -> None:
        """The table, then every failure with its minimal Case, what was wrong, and the line that replays it."""
        table = Table(title="worst error as a fraction of its bound (0: exact)")
        for head in ("property", "world", "examples", *DTYPES, "seconds"):
            table.add_column(head, justify="left" if head == "property" else "right", no_wrap=head != "property")
        for name in dict.fromkeys(name for name, _, _ in self.rows):
            for world in dict.fromkeys(world for of, world, _ in self.rows if of == name):
                rows = self._by_property(world)[name]
                table.add_row(
                    name,
                    str(world),
                    str(sum(row.examples for row in rows.values())),
                    *(_ratio(rows[dtype].worst_ratio) if dtype in rows else "-" for dtype in DTYPES),
                    f"{sum(row.seconds for row in rows.values()):.1f}",
                )
            table.add_section()
        if self.rows:
            self.console.print(table)
        if self.coverage.cases:
            self.console.print(self.coverage.table())
        worst = ", ".join(f"{x} {_ratio(ratio)}" for x, ratio in self.worst_by_dtype().items() if ratio is not None)
        if worst:
            self.say(f"worst error / bound: {worst}")
        for failure in self.failures:
            self._explain(failure)
        self.say(self._verdict())

    def _verdict(self) -> str:
        """How many examples held, of how many ranks, in what time; and that this was all, or what was not."""
        held = counted(self.examples, "example") + (" held" if self.failures else "")
        if self.examples > 1:
            held += f", {self.distributed} of them distributed,"
        elif not self.examples and self.failures:
            held = "no example held"
        every = "all held" if self.examples != 1 else "it held"
        verdict = counted(len(self.failures), "counter-example") if self.failures else every
        return f"{held} in {self.seconds:.1f} s: {verdict}{', then interrupted' if self.interrupted else ''}"

    def _explain(self, failure: Failure) -> None:
        # Printed without markup or wrapping: the Case and the line must survive a copy.
        self.console.rule(style="red")
        for line in (
            f"{failure.kind}: {failure.broken}, world {failure.world}, on {failure.backend}",
            failure.message,
            json.dumps(failure.record),
            f"replay: {failure.replay}",
        ):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if failure.kind == RankHang.kind and failure.backend != "sim":
            self.say("with --backend sim that line says who waits for whom, if the simulation hangs too")

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from an earlier report, as `to_dict` made it.

        Raises KeyError, TypeError, ValueError for anything else.
        """
        self.examples, self.distributed = (whole(name, data[name]) for name in ("examples", "distributed"))
        self.seconds = _real("seconds", data["seconds"])
        for row in data["rows"]:
            ratio = math.nan if row["worst_ratio"] is None else _real("worst_ratio", row["worst_ratio"])
            if row["dtype"] not in DTYPES:
                raise ValueError(f"dtype is {row['dtype']!r}; it must be one of {', '.join(DTYPES)}")
            key = _text("property", row["property"]), whole("world", row["world"], 1), row["dtype"]
            self.rows[key] = Row(whole("examples", row["examples"]), ratio, _real("seconds", row["seconds"]))
        self.failures = [Failure.from_dict(entry) for entry in data["failures"]]
        reached = {_text("a feature", name): whole(name, n) for name, n in dict(data["reached"]["with"]).items()}
        self.coverage = Coverage(whole("cases", data["reached"]["cases"]), dict.fromkeys(FEATURES, 0) | reached)

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
                    "worst_ratio": row.worst_ratio if math.isfinite(row.worst_ratio) else None,
                    "seconds": round(row.seconds, 3),
                }
                for (name, world, dtype), row in sorted(self.rows.items())
            ],
            "reached": {"cases": self.coverage.cases, "with": self.coverage.to_dict()},
            "failures": [failure.to_dict() for failure in self.failures],
            **({"interrupted": True} if self.interrupted else {}),
            **self.extras,
        }


def whole(name: str, value: object, least: int = 0) -> int:
    """The value itself. Raises ValueError unless it is an integer of at least that."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    return value


def _real(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0")
    return float(value)  # type: ignore[arg-type]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be text")
    return value


def _ratio(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def save_record(
    failure: VerificationFailure, name: str, world: int, record: Mapping[str, Any], folder: Path, backend: str
) -> Failure:
    """Write a minimal example as JSON in a file named after the kind of failure and a digest of the example."""
    text = json.dumps(record, indent=2) + "\n"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    file = folder / f"{failure.kind.replace(' ', '-')}-world-{world}-{digest}.json"
    said = str(failure)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:  # what was found is reported all the same, with the Case in it
        said += f"\n(the Case could not be saved: {error})"
    return Failure(failure.kind, name, world, record, file, said, backend)
