"""The table of kernel times: the fastest kernel of the nearest row, and of GPUs that were not measured."""

from __future__ import annotations

import json

import pytest

from ring.compute.gpu import kernel_times
from ring.compute.gpu.kernel_times import FILE, PASSES, Work, fastest
from ring.compute.kernels import CUDNN, FA4, FLASH, KERNELS, MEASURED
from ring.compute.kernels.kernel import HOPPER, Kernel

ROWS = json.loads(FILE.read_text())["rows"]
SOME = Work("forward", 128, 128, True, False, 1000.0, 32)


def test_the_kernel_of_a_row_is_its_fastest() -> None:
    for row in ROWS:
        work = Work(**{name: row[name] for name in Work._fields})
        kernels = tuple(kernel for kernel in MEASURED if kernel.name in row["ms"])
        assert fastest(kernels, HOPPER, work).name == min(row["ms"], key=row["ms"].get)
        for kernel in kernels:
            assert fastest((kernel,), HOPPER, work) is kernel


def test_records_say_which_kernels_were_measured() -> None:
    timed = {name for row in ROWS for name in row["ms"]}
    assert timed == {kernel.name for kernel in KERNELS if kernel.measured}


def test_all_passes_masks_and_lengths_were_measured() -> None:
    for dims in {(row["dim"], row["value_dim"]) for row in ROWS}:
        kinds = {
            Work(**{name: row[name] for name in Work._fields}).kind
            for row in ROWS
            if (row["dim"], row["value_dim"]) == dims
        }
        assert len(kinds) == 5 * len(PASSES), dims


@pytest.mark.parametrize("kernels", [MEASURED, (FLASH, FA4), (FA4,)])
def test_unmeasured_gpus(kernels: tuple[Kernel, ...]) -> None:
    assert fastest(kernels, (8, 0), SOME) is kernels[0]


@pytest.mark.parametrize(("work", "wanted"), [
    (SOME, "flash"), (SOME._replace(length=9000.0), "cudnn"), (SOME._replace(heads=4000, length=4000.0), "flash"),
    (SOME._replace(dim=64, value_dim=64, length=9000.0), "flash"), (SOME._replace(passed="backward"), "cudnn"),
    (SOME._replace(window=1500), "flash"), (SOME._replace(window=3000, causal=False), "fa4"),
])  # fmt: skip
def test_the_nearest_row_decides(work: Work, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims count before windows, these before lengths, and lengths before the number of heads. Rows of other
    passes do not count, nor rows without a window for a call with one, whose mask does not count.
    """
    rows = [(SOME, {"cudnn": 2.0, "flash": 1.0}), (SOME._replace(length=8000.0), {"cudnn": 1.0, "flash": 2.0})]
    rows += [(SOME._replace(dim=64, value_dim=64), {"cudnn": 2.0, "flash": 1.0, "fa4": 0.5})]
    rows += [(SOME._replace(heads=3200, length=2000.0), {"cudnn": 2.0, "flash": 1.0})]
    windows = [(SOME._replace(window=1023), {"flash": 1.0, "fa4": 2.0})]
    windows += [(SOME._replace(window=4095, length=8000.0), {"flash": 2.0, "fa4": 1.0})]
    table = {SOME.kind: rows, windows[0][0].kind: windows}
    monkeypatch.setattr(kernel_times, "_tables", lambda: {HOPPER: table})
    fastest.cache_clear()
    assert fastest((FLASH, FA4) if work.window else (CUDNN, FLASH), HOPPER, work).name == wanted
    fastest.cache_clear()
