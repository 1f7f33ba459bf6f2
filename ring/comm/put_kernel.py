"""Writes rows of heads into buffers of several GPUs, each where it belongs, in one kernel.

Copy engines would need a copy for each rank, run of rows and tensor, from a buffer into which a kernel has packed it: a
short exchange would take several times as long. The kernel needs multiprocessors, but only as long as it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ring.caching.triton_launcher import Launcher
from ring.comm.put_table import Entry, alignment

_ROWS, _COLUMNS, _WARPS = 32, 128, 4  # per program
_WORD = 16  # bytes


@triton.jit
def _put(  # type: ignore[no-untyped-def]
    source, shared, own, table, batch_step, row_step, head_step, dim_step,
    TARGETS: tl.constexpr, BATCH: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """source (B, rows, heads, D), any strides; table (TARGETS, 8) int64: entries."""
    # Neighbouring programs write to different targets: to all GPUs at once, and to this one's memory meanwhile.
    entry = table + tl.program_id(0) % TARGETS * 8
    rows, columns = tl.load(entry + 2), tl.multiple_of(tl.load(entry + 4), ALIGN)
    row = (tl.program_id(0) // TARGETS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    slot, dim = column // DIM, column % DIM
    head, batch = tl.load(entry + 3) + slot // BATCH, slot % BATCH
    of_column = batch * batch_step + head * head_step + dim * dim_step
    of_row = (tl.load(entry) + row * tl.load(entry + 1)) * row_step
    value = tl.load(source + of_row[:, None] + of_column[None, :], mask)
    to, step = tl.multiple_of(tl.load(entry + 5), ALIGN), tl.multiple_of(tl.load(entry + 6), ALIGN)
    place = to + (row * step)[:, None] + column[None, :]
    if tl.load(entry + 7) != 0:
        tl.store(own + place, value, mask)
    else:
        tl.store(shared + place, value, mask)


class Putter:
    """The kernel for one put of a kind of call. shared: this rank's shared memory, as numbers of the buffers' dtype."""

    def __init__(self, found: Sequence[Entry], shared: torch.Tensor) -> None:
        self._shared, self._table = shared, torch.tensor(found, dtype=torch.int64, device=shared.device)
        rows, columns = max(entry.rows for entry in found), max(entry.columns for entry in found)
        self._targets = len(found)
        self._grid = triton.cdiv(rows, _ROWS) * len(found), triton.cdiv(columns, _COLUMNS), 1
        self._align = alignment(found, _WORD // shared.itemsize)

    def __call__(self, source: torch.Tensor, own: torch.Tensor) -> None:
        """Write (B, rows, heads, D) on the current stream. own: this rank's buffer."""
        batch, _, _, dim = source.shape
        begins = source.data_ptr() % _WORD, own.data_ptr() % _WORD
        dtypes, constants = (source.dtype, own.dtype), (self._targets, batch, dim, self._align)
        launch = _launcher(self._grid, source.device, dtypes, source.stride(), constants, begins)
        launch(source, self._shared, own, self._table)


@lru_cache(maxsize=1024)
def _launcher(
    grid: tuple[int, int, int], device: torch.device, dtypes: tuple[torch.dtype, ...], strides: tuple[int, ...],
    constants: tuple[int, ...], begins: tuple[int, int],
) -> Launcher:  # fmt: skip
    """Return the launcher for tensors of this kind. constants: TARGETS to ALIGN. begins: addresses modulo 16 of the
    source and of the own buffer.
    """
    named = dict(zip(("TARGETS", "BATCH", "DIM", "ALIGN"), constants, strict=True))
    return Launcher(_put, grid, _WARPS, strides, named | {"ROWS": _ROWS, "COLUMNS": _COLUMNS})
