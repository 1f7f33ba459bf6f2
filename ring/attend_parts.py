"""Attention of one block of heads with `same_bits`: part by part, summed in trees (ring/SAME_BITS.md).

    Plan -> parts -> Exchange -> Kernel -> trees -> output

What `ring.attend` does as it comes, in the order of the contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ring.attend import output_like, row_delta
from ring.comm.exchange import Arrival, Exchange
from ring.comm.transport import Transport
from ring.compute import kernel_calls
from ring.compute.accumulator import lse_view
from ring.compute.kernels.kernel import SavedRows, Scores, Tensors3
from ring.compute.part_sums import PartOutputs, PartSum
from ring.lowering import BlockPrograms, KernelCall, Program
from ring.precision import accumulator_dtype
from ring.strided_view import StridedView


def forward(
    block: BlockPrograms, transport: Transport, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (out, lse) of the rows and heads of a block. transport: of the ranks with these heads."""
    outputs, queries = PartOutputs(output_like(q, v), sinks), StridedView(q)
    exchange = Exchange(block.plan, transport, k, v)
    for arrival, calls in zip(exchange.arrivals(), block.forward.arrivals, strict=True):
        for call in calls:
            assert call.tile.part is not None
            tensors = _operands(call, queries, arrival)
            out, lse = _forward(call, tensors, block.scoring)
            outputs.merge(call.tile.part.query, out, lse)
    return outputs.result(q.dtype)


def backward(
    block: BlockPrograms, transport: Transport, program: Program, tensors: Sequence[torch.Tensor],
    dlse: torch.Tensor | None = None, wide: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the rows and heads of a block. tensors, wide: as in `ring.attend.backward`."""
    q, k, v, out, lse, dout = tensors
    dout, out = dout.contiguous(), out.contiguous()  # the order of a sum over the head dim may depend on strides
    dq, dk, dv = PartSum(), PartSum(), PartSum()
    rows = StridedView(dout), StridedView(out), lse_view(lse), row_delta(dout, out, dlse)
    through = None if dlse is None else lse_view(dlse)
    queries, exchange = StridedView(q), Exchange(block.plan, transport, k, v)
    for (arrival, *of_keys), calls in zip(exchange.part_round_trips(dk, dv, PartSum), program.arrivals, strict=True):
        for call in calls:
            part = call.tile.part
            assert part is not None
            saved = [x.view(call.tile.query_rows, call.tile.query_heads) for x in rows]
            lse_grad = None if through is None else through.view(call.tile.query_rows, call.tile.query_heads)
            summands = _backward(call, _operands(call, queries, arrival), saved, lse_grad, block.scoring)
            for total, leaf, summand in zip((dq, *of_keys), (part.query, part.key, part.key), summands, strict=True):
                total.add(leaf, summand)
    grads = [dq.result(q, q.dtype)]
    exchange.last_sums_returned(dk, dv)
    dtype = accumulator_dtype(q.dtype) if wide else q.dtype
    grads += [dk.result(k, dtype), dv.result(v, dtype)]
    exchange.finish()
    return grads


def _operands(call: KernelCall, queries: StridedView, arrival: Arrival) -> list[torch.Tensor]:
    """Return the tile's q, k, v: (1, B, groups, per_group, L, D)."""
    tile = call.tile
    keys = tile.key_rows, tile.key_heads
    return [queries.view(tile.query_rows, tile.query_heads), arrival.key.view(*keys), arrival.value.view(*keys)]


def _entries(x: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Iterate over the batch entries and groups of heads of a tile."""
    return ((slice(b, b + 1), slice(g, g + 1)) for b in range(x.shape[1]) for g in range(x.shape[2]))


def _taken(tensors: Sequence[torch.Tensor], batch: slice, group: slice) -> list[torch.Tensor]:
    """Return one batch entry and group of heads of each tensor, copied: the bits of a matrix product may depend on
    addresses and strides, and on the other products of a batched one.
    """
    return [x[:, batch, group].clone(memory_format=torch.contiguous_format) for x in tensors]


def _forward(call: KernelCall, tensors: list[torch.Tensor], scoring: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a tile."""
    q, _, v = tensors
    if call.kernel.batched:
        q, k, v = (_batched(x) for x in tensors)
        return kernel_calls.forward(call.kernel, q, k, v, call.tile, scoring)
    work = accumulator_dtype(q.dtype)
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=work), q.new_empty(q.shape[:-1], dtype=work)
    for entry in _entries(q):
        one_q, one_k, one_v = _taken(tensors, *entry)
        out[:, *entry], lse[:, *entry] = kernel_calls.forward(call.kernel, one_q, one_k, one_v, call.tile, scoring)
    return out, lse


def _backward(
    call: KernelCall, tensors: list[torch.Tensor], saved: list[torch.Tensor], dlse: torch.Tensor | None, scoring: Scores
) -> Tensors3:
    """Return the tile's summands of dq, dk, dv. saved: dout, out, lse, delta."""
    if call.kernel.batched:
        q, k, v = (_batched(x) for x in tensors)
        dout, out, lse = (_batched(x) for x in saved[:3])
        rows = SavedRows(dout, out, lse, None, None if dlse is None else _batched(dlse))
        with _fixed_order():
            return kernel_calls.backward(call.kernel, q, k, v, rows, call.tile, scoring)
    work = accumulator_dtype(tensors[0].dtype)
    grads = [torch.empty(x.shape, dtype=work, device=x.device) for x in tensors]
    for entry in _entries(tensors[0]):
        one_q, one_k, one_v = _taken(tensors, *entry)
        dout, out, lse, delta = _taken(saved, *entry)
        rows = SavedRows(dout, out, lse.squeeze(-1), delta.squeeze(-1))
        some = kernel_calls.backward(call.kernel, one_q, one_k, one_v, rows, call.tile, scoring)
        for grad, x in zip(grads, some, strict=True):
            grad[:, *entry] = x
    dq, dk, dv = grads
    return dq, dk, dv


def _batched(x: torch.Tensor) -> torch.Tensor:
    """Return (1, B, G, P, L, D) as a contiguous (B, G P, L, D)."""
    return x.flatten(2, 3).squeeze(0).contiguous()


@contextmanager
def _fixed_order() -> Iterator[None]:
    """Make kernels of a backward sum in a fixed order. New memory is left as it is."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
