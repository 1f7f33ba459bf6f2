"""Style of figures, fits, and the records of earlier runs, which the notebooks share.

Nothing here computes attention or writes to disk: a notebook keeps its own figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ring.extras import optional_imports

with optional_imports(__name__):
    import matplotlib
    from cycler import cycler
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis, XAxis
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter
    from scipy import stats

# Okabe and Ito (2008): eight colours that people with any kind of colour blindness can tell apart.
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, BLACK)

DATA = Path(__file__).resolve().parent / "data"
PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def style() -> None:
    """Sets matplotlib up for all later figures: colours, sizes, and 90 dots an inch, so that notebooks stay small."""
    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLOURS),
            "figure.dpi": 90,
            "savefig.dpi": 90,
            "figure.figsize": (7.2, 3.6),
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "lines.markersize": 4,
        }
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


def legend_below(figure: Figure, axes: Axes) -> None:
    """Puts the legend of `axes` under the whole figure, in one line."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)


def efficiency_bars(axes: Axes, efficiency: Mapping[str, Mapping[int, float]], *, title: str = "") -> None:
    """One group of bars for each number of tokens, one bar for each method: method -> tokens -> efficiency."""
    lengths = sorted({tokens for values in efficiency.values() for tokens in values})
    width = 0.8 / len(efficiency)
    for number, (method, values) in enumerate(efficiency.items()):
        places = [group + (number - (len(efficiency) - 1) / 2) * width for group in range(len(lengths))]
        bars = axes.bar(places, [values[tokens] for tokens in lengths], width * 0.92, label=method)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(lengths)), [f"{binary(tokens)} tokens a GPU" for tokens in lengths])
    axes.grid(axis="x", visible=False)
    axes.set(ylim=(0, 1.15), ylabel="efficiency", title=title)
    axes.legend(loc="upper left", ncols=2, fontsize=7.5, bbox_to_anchor=(0, -0.1))


def binary(value: float, unit: str = "") -> str:
    """A number with a binary prefix: 65536 -> "64 Ki", 1.5 * 2**20 -> "1.5 Mi"."""
    power = 0
    while abs(value) >= 1024 and power < len(PREFIXES) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.4g} {PREFIXES[power]}{unit}".rstrip()


def binary_ticks(axis: Axis, unit: str = "") -> None:
    """Makes an axis logarithmic to base 2, with ticks such as "64 Ki"."""
    set_scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
    set_scale("log", base=2)
    axis.set_major_formatter(FuncFormatter(lambda value, _: binary(value, unit)))


# --- fits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PowerLaw:
    """y = prefactor * x ** exponent; `low` to `high` is the confidence interval of the exponent."""

    exponent: float
    low: float
    high: float
    prefactor: float

    def __call__(self, x: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(self.prefactor * np.asarray(x, np.float64) ** self.exponent)

    def __str__(self) -> str:
        return f"exponent {self.exponent:.3f} [{self.low:.3f}, {self.high:.3f}]"


def power_law(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> PowerLaw:
    """Least squares of log y against log x, both (points,), positive.

    The interval is Student's, with points - 2 degrees of freedom: it assumes that the deviations of log y from the line
    are independent and have one variance. Raises ValueError for fewer than three points, for x that are all the same,
    and for numbers that are not positive and finite.
    """
    u, v = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if u.ndim != 1 or u.shape != v.shape or len(u) < 3:
        raise ValueError(f"x and y must be equally long and have at least 3 points, got {u.shape} and {v.shape}")
    if not (np.isfinite(u).all() and np.isfinite(v).all() and (u > 0).all() and (v > 0).all()):
        raise ValueError("a power law needs positive, finite x and y")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if (u == u[0]).all():
        raise ValueError("all x are the same: they determine no exponent")
    (slope, intercept), covariance = np.polyfit(np.log(u), np.log(v), 1, cov=True)
    spread = stats.t.ppf((1 + confidence) / 2, len(u) - 2) * covariance[0, 0] ** 0.5
    return PowerLaw(float(slope), float(slope - spread), float(slope + spread), float(np.exp(intercept)))


# --- records ----------------------------------------------------------------------------------------------------------


def _data() -> Path:
    """The folder of the records. Raises FileNotFoundError where there is none."""
    if not DATA.is_dir():
        raise FileNotFoundError(
            f"there are no records in {DATA}: they are in notebooks/data of the repository; "
            "write `pip install -e .` in a clone of it"
        )
    return DATA


def record(name: str, fields: Sequence[str] = (), made_by: str = "") -> dict[str, Any]:
    """The recorded run `notebooks/data/<name>.json`, from any working directory.

    fields:  what it must have at the top, such as "device", "commit", "command", "rows".
    made_by: the command that makes it, for the message if it is missing.
    Raises FileNotFoundError for a missing record, or folder of records; ValueError for one that is not JSON or lacks a
    field.
    """
    file = _data() / f"{name}.json"
    made = f"; it is made by: {made_by}" if made_by else ""
    if not file.is_file():
        there = ", ".join(sorted(other.stem for other in DATA.glob("*.json"))) or "none"
        raise FileNotFoundError(f"there is no record {file}{made}; the records there are: {there}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"the record {file} is not JSON: {error}{made}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the record {file} must be an object, got {type(found).__name__}{made}")
    missing = [field for field in fields if field not in found]
    if missing:
        raise ValueError(f"the record {file} lacks {', '.join(missing)}{made}")
    return found


# --- seeded defects ---------------------------------------------------------------------------------------------------


def seeded_defects() -> list[dict[str, Any]]:
    """The recorded search for seeded defects, `notebooks/data/seeded_defects.jsonl`: an object for each defect.

    It has `name`, `check` (None for one that was not found), `examples`, `ratio`, `dtype`, `seed` and `commit`, as
    `python -m verification mutants --jsonl FILE` writes them.
    """
    lines = (_data() / "seeded_defects.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- sums of known terms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """y = sum of coefficients times columns; low to high are the coefficients' confidence intervals."""

    names: tuple[str, ...]
    coefficients: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def __str__(self) -> str:
        parts = zip(self.names, self.coefficients, self.low, self.high, strict=True)
        return ", ".join(f"{name} {found:.4g} [{low:.4g}, {high:.4g}]" for name, found, low, high in parts)


def sum_of(columns: Mapping[str, ArrayLike], y: ArrayLike, confidence: float = 0.95) -> Sum:
    """Least squares of y (points,) against the named columns, (points,) each; for a constant term, a column of ones.

    The intervals are Student's, with points - columns degrees of freedom: they assume that the deviations from the
    sum are independent and have one variance. Raises ValueError for too few points, numbers that are not finite, and
    columns that depend on each other.
    """
    a, v = np.stack([np.asarray(x, np.float64) for x in columns.values()], axis=-1), np.asarray(y, np.float64)
    if v.shape != a.shape[:1] or len(v) <= a.shape[1]:
        raise ValueError(f"y must be as long as the columns, with more points than columns: {v.shape}, {a.shape}")
    if not (np.isfinite(a).all() and np.isfinite(v).all()):
        raise ValueError("columns and y must be finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if np.linalg.matrix_rank(a) < a.shape[1]:
        raise ValueError(f"the columns {', '.join(columns)} depend on each other: they determine no coefficients")
    free = len(v) - a.shape[1]
    found: NDArray[np.float64] = np.asarray(np.linalg.lstsq(a, v, rcond=None)[0], np.float64)
    variance = float(((v - a @ found) ** 2).sum()) / free
    spread = stats.t.ppf((1 + confidence) / 2, free) * np.sqrt(variance * np.diag(np.linalg.inv(a.T @ a)))
    return Sum(tuple(columns), found, found - spread, found + spread)


# --- rows of all records ----------------------------------------------------------------------------------------------


def recorded_rows(**wanted: Any) -> list[dict[str, Any]]:
    """Rows of all records in `notebooks/data/` that have rows, each with its record's name and device as `record` and
    `device`, for which every wanted field has the wanted value. A row without that field is left out.

    Raises FileNotFoundError without the folder of records, ValueError for a record that does not parse.
    """
    found = []
    for file in sorted(_data().glob("*.json")):
        content = record(file.stem)
        for row in content.get("rows", ()):
            full = {"record": file.stem, "device": content.get("device"), **row}
            if all(key in full and full[key] == value for key, value in wanted.items()):
                found.append(full)
    return found
