"""The table of kernel times: the fastest kernel of the nearest row, and of GPUs that were not measured."""

from __future__ import annotations

import json

import pytest

from ring.compute.gpu import kernel_times
from ring.compute.gpu.kernel_times import FILE, PASSES, Work, fastest
from ring.compute.kernel_limits import HOPPER

ROWS = json.loads(FILE.read_text())["rows"]
SOME = Work("forward", 128, 128, True, False, 1000.0, 32)


def test_the_kernel_of_a_row_is_its_fastest() -> None:
    for row in ROWS:
        work, names = Work(**{name: row[name] for name in Work._fields}), tuple(row["ms"])
        assert fastest(names, HOPPER, work) == min(row["ms"], key=row["ms"].get)
        for name in names:
            assert fastest((name,), HOPPER, work) == name


def test_every_pass_mask_and_kind_of_lengths_was_measured() -> None:
    for dims in {(row["dim"], row["value_dim"]) for row in ROWS}:
        kinds = {
            (row["passed"], row["causal"], row["varied"]) for row in ROWS if (row["dim"], row["value_dim"]) == dims
        }
        assert len(kinds) == 4 * len(PASSES), dims


@pytest.mark.parametrize(("names", "wanted"), [
    (("flash", "cudnn", "fa4"), "cudnn"), (("fa4", "flash"), "flash"), (("fa4",), "fa4"),
])  # fmt: skip
def test_a_gpu_that_was_not_measured(names: tuple[str, ...], wanted: str) -> None:
    assert fastest(names, (8, 0), SOME) == wanted


@pytest.mark.parametrize(("work", "wanted"), [
    (SOME, "flash"), (SOME._replace(length=9000.0), "cudnn"), (SOME._replace(heads=4000, length=4000.0), "flash"),
    (SOME._replace(dim=64, value_dim=64, length=9000.0), "flash"), (SOME._replace(passed="backward"), "cudnn"),
])  # fmt: skip
def test_the_nearest_row_decides(work: Work, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims count before lengths, and lengths before the number of heads. Rows of other passes do not count."""
    rows = [(SOME, {"cudnn": 2.0, "flash": 1.0}), (SOME._replace(length=8000.0), {"cudnn": 1.0, "flash": 2.0})]
    rows += [(SOME._replace(dim=64, value_dim=64), {"cudnn": 2.0, "flash": 1.0, "fa4": 0.5})]
    rows += [(SOME._replace(heads=3200, length=2000.0), {"cudnn": 2.0, "flash": 1.0})]
    monkeypatch.setattr(kernel_times, "_tables", lambda: {HOPPER: {("forward", True, False): rows}})
    fastest.cache_clear()
    assert fastest(("cudnn", "flash"), HOPPER, work) == wanted
    fastest.cache_clear()
