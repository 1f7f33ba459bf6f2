"""What the notebooks share: fits of known laws, pictures read back square by square, records that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from verification.mutants.catalogue import DEFECTS


@pytest.fixture
def axes() -> Axes:
    return Figure().add_subplot()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "DATA", tmp_path)
    return tmp_path


@pytest.fixture
def settings() -> Iterator[None]:
    with matplotlib.rc_context():
        yield


# --- style ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("settings")
def test_the_style_draws_in_okabe_and_itos_colours_at_no_more_than_100_dots() -> None:
    figures.style()
    drawn = Figure()
    axes = drawn.add_subplot()
    lines = [axes.plot([0, number]) for number in range(8)]
    assert tuple(line.get_color() for (line,) in lines) == figures.COLOURS
    assert len({to_hex(colour) for colour in figures.COLOURS}) == 8
    assert drawn.dpi <= 100 and matplotlib.rcParams["savefig.dpi"] <= 100


# --- pictures ---------------------------------------------------------------------------------------------------------


def shown(axes: Axes) -> list[list[str]]:
    """The colour of every square."""
    (image,) = axes.images
    values = image.get_array()
    assert values is not None
    return [[to_hex(colour) for colour in row] for row in image.to_rgba(values)]


def test_every_square_has_the_colour_of_its_label(axes: Axes) -> None:
    figures.who_sees_whom(axes, np.array([[1, 0, 2], [3, 1, 0]]), ["a", "b", "c"], title="three kinds", cuts=[1])
    white, a, b, c = "#ffffff", *(colour.lower() for colour in figures.COLOURS[:3])
    assert shown(axes) == [[a, white, b], [c, a, white]]
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
    assert "three kinds" in (axes.get_title(), axes.get_title("left"))
    assert "tokens" in axes.get_xlabel() and "tokens" in axes.get_ylabel()
    assert len(axes.lines) == 2


def test_a_mask_of_bool_has_one_kind_of_pair(axes: Axes) -> None:
    figures.who_sees_whom(axes, np.eye(2, dtype=bool), legend=False)
    assert shown(axes) == [[figures.BLUE.lower(), "#ffffff"], ["#ffffff", figures.BLUE.lower()]]
    assert axes.get_legend() is None


@pytest.mark.parametrize(
    ("mask", "labels", "said"),
    [
        (np.zeros(3, int), ["a"], "must be \\(Nq, Nk\\)"),
        (np.zeros((2, 2)), ["a"], "float64"),
        (np.full((2, 2), 2), ["a"], "0 to 1, got 2 to 2"),
        (np.full((2, 2), -1), ["a"], "got -1"),
        (np.zeros((2, 2), int), [], "at least one"),
        (np.zeros((2, 2), int), list("abcdefghi"), "8 colours"),
    ],
)
def test_a_mask_that_cannot_be_shown_is_refused(axes: Axes, mask: NDArray[Any], labels: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        figures.who_sees_whom(axes, mask, labels)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "", "0"), (1023, "", "1023"), (1024, "", "1 Ki"), (1536, "", "1.5 Ki"), (2**60, "", "1024 Pi"),
     (5, "B", "5 B"), (3 * 2**30, "B", "3 GiB")],
)  # fmt: skip
def test_binary_prefixes(value: float, unit: str, text: str) -> None:
    assert figures.binary(value, unit) == text


def test_ticks_with_binary_prefixes(axes: Axes) -> None:
    axes.plot([1024, 4096], [1, 2])
    figures.binary_ticks(axes.xaxis, "B")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert axes.xaxis.get_major_formatter()(2048, None) == "2 KiB"


# --- fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 2.0])
def test_an_exact_power_law_is_found_exactly(exponent: float) -> None:
    x = np.array([1.0, 2.0, 8.0, 64.0])
    law = figures.power_law(x, 3.0 * x**exponent)
    assert law.exponent == pytest.approx(exponent, abs=1e-12) and law.prefactor == pytest.approx(3.0)
    assert law.low <= law.exponent <= law.high and law.high - law.low < 1e-6
    assert law(x) == pytest.approx(3.0 * x**exponent)


def test_the_interval_is_students() -> None:
    """By hand: log2 x = 0, 1, 2, 3 and log2 y = 0, 1, 1, 2. Slope 0.6, residuals -0.1, 0.3, -0.3, 0.1: their squares
    add up to 0.2, so that the variance is 0.1, and 0.1 / 5 that of the slope."""
    law = figures.power_law([1, 2, 4, 8], [1, 2, 2, 4])
    half = stats.t.ppf(0.975, 2) * 0.02**0.5
    assert stats.t.ppf(0.975, 2) == pytest.approx(4.302653)  # as tables have it
    assert (law.exponent, law.low, law.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert law.prefactor == pytest.approx(2**0.1)
    narrow = figures.power_law([1, 2, 4, 8], [1, 2, 2, 4], confidence=0.5)
    assert law.low < narrow.low < narrow.high < law.high


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        ([1, 2], [1, 2], "3 points"),
        ([1, 2, 3], [1, 2], "equally long"),
        ([0, 1, 2], [1, 2, 3], "positive"),
        ([1, 2, 3], [1, -2, 3], "positive"),
        ([1, 2, 3], [1, np.nan, 3], "finite"),
        ([2, 2, 2], [1, 2, 3], "no exponent"),
    ],
)
def test_points_without_a_law_are_refused(x: list[float], y: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        figures.power_law(x, y)


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_record_is_read(data: Path) -> None:
    (data / "run.json").write_text(json.dumps({"device": "x", "rows": [1]}))
    assert figures.record("run", fields=["device", "rows"]) == {"device": "x", "rows": [1]}


def test_a_record_that_is_missing_says_which_and_how_to_make_it(data: Path) -> None:
    (data / "other.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"run\.json; it is made by: do this; .* are: other"):
        figures.record("run", made_by="do this")


@pytest.mark.parametrize(
    ("text", "said"), [('{"rows": [', "not JSON"), ("", "not JSON"), ("[1]", "got list"), ("{}", "lacks device, rows")]
)
def test_a_record_that_does_not_parse_says_so(data: Path, text: str, said: str) -> None:
    (data / "run.json").write_text(text)
    with pytest.raises(ValueError, match=rf"run\.json.*{said}.*do this"):
        figures.record("run", fields=["device", "rows"], made_by="do this")


def test_the_records_of_the_repository_can_be_read() -> None:
    names = [file.stem for file in figures.DATA.glob("*.json")]
    assert names
    for name in names:
        assert figures.record(name)


# --- sums of known terms, rows of all records -------------------------------------------------------------------------


def test_exact_sums_have_intervals_of_no_width() -> None:
    p = np.array([1.0, 2, 4, 8])
    fit = figures.sum_of({"1/p": 1 / p, "1": np.ones(4)}, 3 / p + 5)
    assert np.allclose(fit.coefficients, [3, 5])
    assert np.allclose(fit.low, fit.high)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    x = np.linspace(0, 1, 8)
    held = 0
    for _ in range(1000):
        fit = figures.sum_of({"x": x, "1": np.ones(8)}, 2 * x - 1 + rng.normal(size=8), confidence=0.9)
        held += bool(fit.low[0] <= 2 <= fit.high[0])
    assert 870 <= held <= 930  # binomial, 1000 x 0.9: three standard deviations are 28


@pytest.mark.parametrize(
    ("columns", "y"),
    [
        ({"a": [1, 2], "b": [2, 1]}, [1, 2]),
        ({"a": [1, 2, 3]}, [1, 2]),
        ({"a": [1, 2, 3], "b": [2, 4, 6]}, [1, 2, 3]),
        ({"a": [1, 2, float("nan")]}, [1, 2, 3]),
    ],
)
def test_what_determines_nothing_is_refused(columns: dict[str, list[float]], y: list[float]) -> None:
    with pytest.raises(ValueError):
        figures.sum_of(columns, y)


def test_rows_of_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "DATA", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({"device": "A", "rows": [{"ms": 1, "graph": True}, {"ms": 2}]}))
    (tmp_path / "two.json").write_text(json.dumps({"rates": []}))
    assert [row["ms"] for row in figures.recorded_rows()] == [1, 2]
    assert figures.recorded_rows(graph=True) == [{"record": "one", "device": "A", "ms": 1, "graph": True}]
    (tmp_path / "three.json").write_text("{")
    with pytest.raises(ValueError, match="three.json"):
        figures.recorded_rows()


def test_the_recorded_search_has_every_defect_of_the_catalogue() -> None:
    assert {defect.name for defect in DEFECTS} <= {defect["name"] for defect in figures.seeded_defects()}
