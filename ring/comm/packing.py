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
from ring.strided_view import Slot

_SLOTS, _WARPS = 32, 4  # per program


@triton.jit
def _copy(source, step, to, valid, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy DIM numbers, `step` apart, from each address of `source` to each of `to`."""
    column = tl.arange(0, BLOCK)
    mask = valid[:, None] & (column < DIM)[None, :]
    tl.store(to[:, None] + column[None, :], tl.load(source[:, None] + column[None, :] * step, mask), mask)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    table, k, v, send_buffer, count,
    k_batch, k_row, k_head, k_dim, v_batch, v_row, v_head, v_dim, slot_step, value_step,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """send_buffer (slots, numbers of a slot), contiguous; table (2, slots) int32: row and head of each."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    batch = tl.program_id(1).to(tl.int64)
    valid = slot < count
    row, head = tl.load(table + slot, valid, other=0).to(tl.int64), tl.load(table + count + slot, valid, other=0)
    to = slot.to(tl.int64) * slot_step
    key, to_key = k + batch * k_batch + row * k_row + head * k_head, send_buffer + to + batch * KEY_DIM
    _copy(key, k_dim, to_key, valid, KEY_DIM, KEY_BLOCK)
    value, to_value = v + batch * v_batch + row * v_row + head * v_head, send_buffer + to + batch * VALUE_DIM
    _copy(value, v_dim, to_value + value_step, valid, VALUE_DIM, VALUE_BLOCK)


def pack(gathers: tuple[SlotMap, ...], k: torch.Tensor, v: torch.Tensor, send_buffer: torch.Tensor) -> None:
    """Fill the front of the send buffer, (slots, numbers of a slot), contiguous. k, v: (B, tokens, Hk, head dim), any
    strides.
    """
    begins = k.data_ptr() % 16, v.data_ptr() % 16, send_buffer.data_ptr() % 16
    table, slot = _table(gathers, k.device), Slot(k.shape[0], k.shape[3], v.shape[3])
    launch = _launcher(table.shape[1], k.device, k.dtype, slot, k.stride(), v.stride(), begins)
    keep_alive_in_graph(table)
    launch(table, k, v, send_buffer)


@lru_cache(maxsize=1024)
def _launcher(
    count: int, device: torch.device, dtype: torch.dtype, slot: Slot, k_strides: tuple[int, ...],
    v_strides: tuple[int, ...], begins: tuple[int, ...],
) -> Launcher:  # fmt: skip
    """Return the launcher for `count` slots, and keys and values of this kind. begins: addresses modulo 16 of k, v and
    the send buffer.
    """
    numbers = count, *k_strides, *v_strides, slot.numbers, slot.batch * slot.key_dim
    blocks = {"KEY_BLOCK": triton.next_power_of_2(slot.key_dim), "VALUE_BLOCK": triton.next_power_of_2(slot.value_dim)}
    constants = {"KEY_DIM": slot.key_dim, "VALUE_DIM": slot.value_dim, **blocks, "SLOTS": _SLOTS}
    return Launcher(_pack, (triton.cdiv(count, _SLOTS), slot.batch, 1), _WARPS, numbers, constants)


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
