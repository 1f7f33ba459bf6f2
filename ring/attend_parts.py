"""Attention of one block of heads with `same_bits`: part by part, summed in trees (ring/SAME_BITS.md).

    Plan -> parts -> Exchange -> Kernel -> trees -> output

What `ring.attend` does as it comes, in the order of the contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ring.attend import output_like
from ring.caching.weak_cache import cached_on
from ring.comm.exchange import Arrival, Exchange
from ring.comm.transport import Transport
from ring.compute import kernel_calls
from ring.compute.accumulator import lse_view
from ring.compute.kernels.kernel import Kernel, SavedRows, Scores, Tensors3
from ring.compute.part_sums import PartOutputs, PartSum
from ring.lowering import BlockPrograms, KernelCall, Program
from ring.plan.tile import Tile
from ring.precision import accumulator_dtype
from ring.strided_view import StridedView, batched


def forward(
    block: BlockPrograms, transport: Transport, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sinks: torch.Tensor | None = None, keeps: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the results of a block, as `ring.attend.forward` does."""
    outputs, queries = PartOutputs(output_like(q, v), sinks, block.plan.disjoint), StridedView(q)
    exchange = Exchange(block.plan, transport, k, v, keeps=keeps)
    for arrival, calls in zip(exchange.arrivals(), block.forward.arrivals, strict=True):
        for call in calls:
            assert call.tile.part is not None
            outputs.merge(call.tile.part.query, *_forward(call, queries, arrival, block.scoring))
    results = outputs.result()
    exchange.finish()
    return [*results, *exchange.keeping]


def backward(
    block: BlockPrograms, transport: Transport, program: Program, tensors: Sequence[torch.Tensor],
    dlse: torch.Tensor | None = None, wide: bool = False, kept: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the rows and heads of a block. tensors, wide, kept: as in `ring.attend.backward`."""
    q, k, v, out, lse, dout = tensors
    dq, dk, dv = PartSum(), PartSum(), PartSum()
    rows = [StridedView(q), StridedView(dout), StridedView(out), lse_view(lse)]
    rows += [] if dlse is None else [lse_view(dlse)]
    exchange = Exchange(block.plan, transport, k, v, kept=kept)
    trips, arrivals = exchange.part_round_trips(dk, dv, PartSum), exchange.in_order(program.arrivals)
    for (arrival, *of_keys), calls in zip(trips, arrivals, strict=True):
        for call in calls:
            part = call.tile.part
            assert part is not None
            summands = _backward(call, rows, arrival, block.scoring)
            for total, leaf, summand in zip((dq, *of_keys), (part.query, part.key, part.key), summands, strict=True):
                total.add(leaf, summand)
    grads = [dq.result(q, q.dtype)]
    exchange.last_sums_returned(dk, dv)
    dtype = accumulator_dtype(q.dtype) if wide else q.dtype
    grads += [dk.result(k, dtype), dv.result(v, dtype)]
    exchange.finish()
    return grads


def _forward(
    call: KernelCall, queries: StridedView, arrival: Arrival, scoring: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a tile."""
    kernel = call.kernel
    tensors = _views(call, [queries], arrival)
    if not kernel.alone:
        q, k, v = tensors
        return kernel_calls.forward(kernel, q, k, v, call.tile, scoring)
    one = _of_one_group(call.tile)
    results = [kernel_calls.forward(kernel, q, k, v, one, scoring) for q, k, v in _entries(kernel, tensors)]
    out, lse = (_joined(x, tensors[0]) for x in zip(*results, strict=True))
    return out, lse


def _backward(call: KernelCall, rows: list[StridedView], arrival: Arrival, scoring: Scores) -> list[torch.Tensor]:
    """Return the tile's summands of dq, dk, dv. rows: q, dout, out, lse and, unless it has no gradient, that of lse."""
    kernel = call.kernel
    tensors = _views(call, rows, arrival)
    with fixed_order() if kernel.batched else nullcontext():
        if not kernel.alone:
            return list(_kernel_backward(kernel, call.tile, tensors, scoring))
        one = _of_one_group(call.tile)
        results = [_kernel_backward(kernel, one, entry, scoring) for entry in _entries(kernel, tensors)]
    return [_joined(x, tensors[0]) for x in zip(*results, strict=True)]


def _kernel_backward(kernel: Kernel, tile: Tile, tensors: Sequence[torch.Tensor], scoring: Scores) -> Tensors3:
    """Return the summands of these entries. tensors: q, dout, out, lse, k, v or, before k, the gradient of lse."""
    q, dout, out, lse, *dlse, k, v = tensors
    if kernel.batched:
        saved = SavedRows(dout, out, lse, None, dlse[0] if dlse else None)
    else:
        # Summed for as many rows in every call: the order in which a device sums may depend on their number.
        work = accumulator_dtype(out.dtype)
        delta = (dout.to(work) * out.to(work)).sum(-1)
        saved = SavedRows(dout, out, lse.squeeze(-1), delta - dlse[0].squeeze(-1) if dlse else delta)
    return kernel_calls.backward(kernel, q, k, v, saved, tile, scoring)


def _views(call: KernelCall, rows: Sequence[StridedView], arrival: Arrival) -> list[torch.Tensor]:
    """Return the tile's part of each tensor, then its keys and values: (1, B, groups, per_group, L, D), batched for a
    kernel that takes all at once.
    """
    tile, view = call.tile, StridedView.view if call.kernel.alone else StridedView.batched
    queries, keys = (tile.query_rows, tile.query_heads), (tile.key_rows, tile.key_heads)
    return [*(view(x, *queries) for x in rows), view(arrival.key, *keys), view(arrival.value, *keys)]


def _entries(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield each batch entry and group of heads of a tile, copied: the bits of a matrix product may depend on addresses
    and strides, and on the other products of a batched one.
    """
    for b in range(tensors[0].shape[1]):
        for g in range(tensors[0].shape[2]):
            entry = (x[:, b : b + 1, g : g + 1].clone(memory_format=torch.contiguous_format) for x in tensors)
            yield [batched(x) for x in entry] if kernel.batched else [*entry]


def _joined(entries: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the results of all entries as those of a tile like q, (1, B, groups, per_group, L, D)."""
    batch, groups = like.shape[1:3]
    return torch.cat(list(entries), 2).unflatten(2, (batch, groups)).squeeze(1)


@cached_on
def _of_one_group(tile: Tile) -> Tile:
    """Return the tile with its first group of heads alone. The same one every time: its tables on a GPU are copied
    once.
    """
    query, key = (
        x._replace(groups=1, ids=None if x.ids is None else x.ids[:1]) for x in (tile.query_heads, tile.key_heads)
    )
    return replace(tile, query_heads=query, key_heads=key)


@contextmanager
def fixed_order() -> Iterator[None]:
    """Make kernels of a backward sum in a fixed order. New memory is left as it is."""
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]
