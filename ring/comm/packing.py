"""Fills the send buffer with all keys and values that a step sends, in one GPU kernel.

Separate copies for each block, message and tensor, as on the CPU, would delay a short call by a dozen small kernels.
Here a table, computed once for a plan's step, gives the row and head of every slot of the send buffer.
`Exchange._pack` has the plain version, for buffers and shards that exceed 32-bit counts.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep_alive_in_graph
from ring.caching.triton_launcher import Launcher
from ring.plan.plan import SlotMap
from ring.plan.ranges import Ints

_SLOTS, _WARPS = 32, 4  # per program


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    table, k, v, send_buffer, count,
    k_batch, k_row, k_head, k_dim, v_batch, v_row, v_head, v_dim, slot_step, value_step,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """send_buffer (slots, 2, B, D), contiguous; table (2, slots) int32: row and head of each."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = slot < count
    row, head = tl.load(table + slot, valid, other=0).to(tl.int64), tl.load(table + count + slot, valid, other=0)
    mask = valid[:, None] & (column < DIM)[None, :]
    key = k + (batch * k_batch + row * k_row + head * k_head)[:, None] + column[None, :] * k_dim
    value = v + (batch * v_batch + row * v_row + head * v_head)[:, None] + column[None, :] * v_dim
    to = send_buffer + (slot.to(tl.int64) * slot_step + batch * DIM)[:, None] + column[None, :]
    tl.store(to, tl.load(key, mask), mask)
    tl.store(to + value_step, tl.load(value, mask), mask)


def pack(gathers: tuple[SlotMap, ...], k: torch.Tensor, v: torch.Tensor, send_buffer: torch.Tensor) -> None:
    """Fill the front of the send buffer, (slots, 2, B, D), contiguous. k, v: (B, tokens, Hk, D), any strides."""
    begins = k.data_ptr() % 16, v.data_ptr() % 16, send_buffer.data_ptr() % 16
    table = _table(gathers, k.device)
    launch = _launcher(table.shape[1], k.device, k.dtype, k.shape, k.stride(), v.stride(), begins)
    keep_alive_in_graph(table)
    launch(table, k, v, send_buffer)


@lru_cache(maxsize=1024)
def _launcher(
    count: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], k_strides: tuple[int, ...],
    v_strides: tuple[int, ...], begins: tuple[int, ...],
) -> Launcher:  # fmt: skip
    """Return the launcher for `count` slots, and keys and values of this kind. begins: addresses modulo 16 of k, v and
    the send buffer.
    """
    batch, _, _, dim = shape
    numbers = count, *k_strides, *v_strides, 2 * batch * dim, batch * dim
    constants = {"DIM": dim, "BLOCK": triton.next_power_of_2(dim), "SLOTS": _SLOTS}
    return Launcher(_pack, (triton.cdiv(count, _SLOTS), batch, 1), _WARPS, numbers, constants)


# Tables in GPU memory; with documents every training step has new ones.
_tables: BoundedCache[tuple[object, ...], torch.Tensor] = BoundedCache(1024, most_bytes=2**28)


def _table(gathers: tuple[SlotMap, ...], device: torch.device) -> torch.Tensor:
    """(2, slots) int32: row and head of each slot, cached on the GPU."""
    return _tables.get_or_make(
        (gathers, device), lambda: _rows_and_heads(gathers).to(device), lambda table: table.nbytes
    )


def _rows_and_heads(gathers: tuple[SlotMap, ...]) -> torch.Tensor:
    slots, rows, heads = (np.concatenate(column) for column in zip(*map(_listed, gathers), strict=True))
    order = np.argsort(slots)
    assert np.array_equal(slots[order], np.arange(len(slots)))  # every slot once, from the front
    return torch.from_numpy(np.stack((rows[order], heads[order])).astype(np.int32))


def _listed(gather: SlotMap) -> tuple[Ints, Ints, Ints]:
    """Slots, and the row and head of the shard in each."""
    columns, heads = (np.array(x.listed(), np.int64).reshape(-1) for x in (gather.columns, gather.heads))
    rows, slots = (x.listed().reshape(-1) for x in (gather.rows, gather.slots))
    shape = len(rows), len(heads)
    return (
        (slots[:, None] + columns).reshape(-1),
        np.broadcast_to(rows[:, None], shape).reshape(-1),
        np.broadcast_to(heads, shape).reshape(-1),
    )
