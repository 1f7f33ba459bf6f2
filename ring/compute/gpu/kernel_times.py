"""Measured times of the fused kernels of GPUs, and the fastest kernel for a call.

The table, `kernel_times.json`, is written by `python scripts/bench kernels`, on one GPU. A call takes the row that is
nearest in head dims, window, length and number of sequences. A GPU of another compute capability than the table's has
no row: there the first kernel of the table `ring.compute.kernels` is taken.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ring.compute.kernels.kernel import Kernel

FILE = Path(__file__).with_name("kernel_times.json")
PASSES = ("forward", "backward", "repeatable backward")


class Work(NamedTuple):
    """Sizes of a kernel call.

    passed     one of PASSES
    dim        head dim of keys
    value_dim  head dim of values
    causal     True for a causal mask
    varied     True for sequences of several lengths
    length     geometric mean of the rows and keys of a sequence
    heads      sequences times query heads
    window     most positions between a query and its keys; 0: no window
    """

    passed: str
    dim: int
    value_dim: int
    causal: bool
    varied: bool
    length: float
    heads: int
    window: int = 0

    @property
    def kind(self) -> tuple[str, bool, bool, bool]:
        """Pass, mask and lengths: calls of other kinds tell nothing of it. Windows were measured in causal calls."""
        if self.window:
            return self.passed, True, False, True
        return self.passed, self.causal, self.varied, False


@lru_cache(maxsize=1)
def _tables() -> dict[tuple[int, int], dict[tuple[str, bool, bool, bool], list[tuple[Work, dict[str, float]]]]]:
    """Return the rows by compute capability and kind."""
    record = json.loads(FILE.read_text())
    table: dict[tuple[str, bool, bool, bool], list[tuple[Work, dict[str, float]]]] = {}
    for row in record["rows"]:
        work = Work(**{name: row[name] for name in Work._fields})
        table.setdefault(work.kind, []).append((work, row["ms"]))
    major, minor = record["capability"]
    return {(major, minor): table}


@lru_cache(maxsize=4096)
def fastest(kernels: tuple[Kernel, ...], capability: tuple[int, int], work: Work) -> Kernel:
    """Return the fastest of some kernels for a call.

    Args:
        kernels: at least one, in the order of `ring.compute.kernels`.
        capability: of the GPU.
        work: sizes of the call.
    """
    if len(kernels) == 1:
        return kernels[0]
    names = {kernel.name for kernel in kernels}
    rows = _tables().get(capability, {}).get(work.kind, [])
    rows = [row for row in rows if len(row[1].keys() & names) > 1]
    if not rows:
        return kernels[0]
    _, times = min(rows, key=lambda row: _distance(row[0], work))
    return min((kernel for kernel in kernels if kernel.name in times), key=lambda kernel: times[kernel.name])


def _distance(row: Work, work: Work) -> float:
    """Return how far apart two calls of a kind are; head dims count before windows, and these before lengths."""
    dims = abs(math.log2(row.dim / work.dim)) + abs(math.log2(row.value_dim / work.value_dim))
    window = abs(math.log2(row.window / work.window)) if work.window else 0.0
    length = abs(math.log2(row.length / work.length)) + abs(math.log2(row.heads / work.heads)) / 2
    return 10_000 * dims + 100 * window + length
