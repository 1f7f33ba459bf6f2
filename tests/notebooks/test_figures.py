"""Shared code of the notebooks: fits of known laws, records that cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from notebooks import figures
from verification.mutants.catalogue import DEFECTS


def test_power_laws_have_students_intervals() -> None:
    """Compare with a fit by hand: log2 x = 0, 1, 2, 3 and log2 y = 0, 1, 1, 2. Slope 0.6, residuals -0.1, 0.3, -0.3,
    0.1: their squares add up to 0.2, so that the variance is 0.1, and 0.1 / 5 that of the slope."""
    law = figures.power_law([1, 2, 4, 8], [1, 2, 2, 4])
    half = stats.t.ppf(0.975, 2) * 0.02**0.5
    assert (law.exponent, law.low, law.high) == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert law.prefactor == pytest.approx(2**0.1) and law(4) == pytest.approx(2**0.1 * 4**0.6)
    narrow = figures.power_law([1, 2, 4, 8], [1, 2, 2, 4], confidence=0.5)
    assert law.low < narrow.low < narrow.high < law.high


def test_intervals_of_sums_hold_the_truth_at_their_level() -> None:
    x, rng = np.linspace(0, 1, 8), np.random.default_rng(1)
    columns = {"x": x, "1": np.ones(8)}
    exact = figures.sum_of(columns, 3 * x + 5)
    assert np.allclose([exact.coefficients, exact.low, exact.high], [3, 5])
    fits = [figures.sum_of(columns, 2 * x - 1 + rng.normal(size=8), confidence=0.9) for _ in range(1000)]
    # Binomial, 1000 x 0.9: three standard deviations are 28.
    assert 870 <= sum(bool(fit.low[0] <= 2 <= fit.high[0]) for fit in fits) <= 930


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: figures.power_law([1, 2], [1, 2]), "3 points"),
        (lambda: figures.power_law([1, 2, 3], [1, 2]), "equally long"),
        (lambda: figures.power_law([0, 1, 2], [1, 2, 3]), "positive"),
        (lambda: figures.power_law([1, 2, 3], [1, np.nan, 3]), "finite"),
        (lambda: figures.power_law([2, 2, 2], [1, 2, 3]), "no exponent"),
        (lambda: figures.power_law([1, 2, 3], [1, 2, 4], confidence=1), "confidence"),
        (lambda: figures.sum_of({"a": [1, 2], "b": [2, 1]}, [1, 2]), "more points than columns"),
        (lambda: figures.sum_of({"a": [1, 2, 3]}, [1, 2]), "as long as the columns"),
        (lambda: figures.sum_of({"a": [1, 2, 3], "b": [2, 4, 6]}, [1, 2, 3]), "depend on each other"),
        (lambda: figures.sum_of({"a": [1, 2, np.nan]}, [1, 2, 3]), "finite"),
    ],
)
def test_unfittable_points_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_missing_records_say_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [file.stem for file in figures.DATA.glob("*.json")]
    assert names and all(figures.record(name) for name in names)
    monkeypatch.setattr(figures, "DATA", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({"device": "A", "rows": [{"ms": 1, "graph": True}, {"ms": 2}]}))
    (tmp_path / "two.json").write_text(json.dumps({"rates": []}))
    assert figures.record("two", fields=["rates"]) == {"rates": []}
    assert [row["ms"] for row in figures.recorded_rows()] == [1, 2]
    assert figures.recorded_rows(graph=True) == [{"record": "one", "device": "A", "ms": 1, "graph": True}]
    with pytest.raises(FileNotFoundError, match=r"run\.json; it is made by: do this; .* are: one, two"):
        figures.record("run", made_by="do this")
    for text, said in (('{"rows": [', "not JSON"), ("[1]", "got list"), ("{}", "lacks device, rows")):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=rf"run\.json.*{said}.*do this"):
            figures.record("run", fields=["device", "rows"], made_by="do this")


def test_the_recorded_search_has_every_defect_of_the_catalogue() -> None:
    assert {defect.name for defect in DEFECTS} <= {defect["name"] for defect in figures.seeded_defects()}


@pytest.mark.parametrize("read", [lambda: figures.record("run"), figures.recorded_rows, figures.seeded_defects])
def test_missing_records_are_located(
    read: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "DATA", tmp_path / "data")
    with pytest.raises(FileNotFoundError, match=r"notebooks/data of the repository.*pip install -e \."):
        read()
