"""Attention of one block of heads: runs its program, forward and backward.

    Plan -> Program -> Exchange -> Kernel -> Accumulator -> output

Every partial result is (rows, out, lse), for any branch, source rank, step and bucket, and is merged into one
accumulator per query row. The backward of a partial uses its own q, k, v and the global out and lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ring.comm.exchange import Arrival, Exchange
from ring.comm.transport import Transport
from ring.compute import kernel_calls
from ring.compute.accumulator import Accumulator, OutputMerge, Sum, TensorSum, lse_view
from ring.compute.kernels.kernel import Into, SavedRows, Scores
from ring.lowering import BlockPrograms, KernelCall, Program
from ring.precision import accumulator_dtype
from ring.strided_view import StridedView

# Limit on query rows times heads: `ring.compute.gpu.merge_kernel` counts them in 32 bits.
_MAX_COUNTED = 2**30
# Products of dout and out in memory at a time: as a whole, in fp32, they would be the largest tensors of a backward.
_PRODUCTS = 2**24


def forward(
    block: BlockPrograms,
    transport: Transport,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    keeps: bool = False,
) -> list[torch.Tensor]:
    """Return (out, lse) of the rows and heads of a block, and received keys if some are kept. transport: of the ranks
    with these heads. keeps: see `Exchange`.
    """
    like = output_like(q, v)
    accumulator, queries, scoring = accumulator_for(like, sinks), StridedView(q), block.scoring
    exchange = Exchange(block.plan, transport, k, v, keeps=keeps)
    for arrival, calls in zip(exchange.arrivals(), block.forward.arrivals, strict=True):
        for call in calls:
            tile, view = call.tile, StridedView.batched if call.kernel.batched else StridedView.view
            query = view(queries, tile.query_rows, tile.query_heads)
            key = view(arrival.key, tile.key_rows, tile.key_heads)
            value = view(arrival.value, tile.key_rows, tile.key_heads)
            out, lse = kernel_calls.forward(call.kernel, query, key, value, tile, scoring)
            accumulator.merge(tile.query_rows, tile.query_heads, out, lse)
    results = accumulator.result(q.dtype)
    exchange.finish()
    return [*results, *exchange.keeping]


def backward(
    block: BlockPrograms,
    transport: Transport,
    program: Program,
    tensors: Sequence[torch.Tensor],
    dlse: torch.Tensor | None = None,
    wide: bool = False,
    kept: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return (dq, dk, dv) of the rows and heads of a block.

    tensors: q, k, v, out, lse, dout. wide: leave gradients of keys and values in the accumulator's dtype. kept: see
    `Exchange`.
    """
    q, k, v, out, lse, dout = tensors
    sums = sum_class_for(q)
    dq, dk, dv = sums(q), sums(k), sums(v)
    rows = _QueryRows(StridedView(q), StridedView(dout), StridedView(out), lse_view(lse), dlse, dq)
    exchange = Exchange(block.plan, transport, k, v, kept=kept)
    for arrival, calls in zip(exchange.round_trips(dk, dv), exchange.in_order(program.arrivals), strict=True):
        for call in calls:
            _add_gradients(block.scoring, call, arrival, rows)
    grads = sums.results([dq], q.dtype)  # while the last gradients of keys are in flight
    exchange.last_returned(dk, dv)
    grads += sums.results([dk, dv], accumulator_dtype(q.dtype) if wide else q.dtype)
    exchange.finish()
    return grads


@dataclass(eq=False)
class _QueryRows:
    """The local query rows in backward, and the sum of their gradients."""

    q: StridedView
    dout: StridedView
    out: StridedView
    lse: StridedView
    dlse: torch.Tensor | None
    dq: TensorSum

    @cached_property
    def delta(self) -> StridedView:
        """rowsum(dout out) - dlse, for the math kernel: fused kernels compute it themselves."""
        return row_delta(self.dout.x, self.out.x, self.dlse)


def row_delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> StridedView:
    """Return rowsum(dout out) - dlse."""
    work = accumulator_dtype(out.dtype)
    if dout.numel() <= _PRODUCTS:
        products = _row_products(dout, out, work)
    else:
        tokens = max(1, _PRODUCTS // dout[:, :1].numel())
        pairs = zip(dout.split(tokens, 1), out.split(tokens, 1), strict=True)
        products = torch.cat([_row_products(*pair, work) for pair in pairs], 1)
    delta = products.transpose(1, 2)  # (B, H, N)
    return lse_view(delta if dlse is None else delta - dlse)


def _row_products(dout: torch.Tensor, out: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    return (dout.to(work) * out.to(work)).sum(-1)


def _add_gradients(scoring: Scores, call: KernelCall, arrival: Arrival, rows: _QueryRows) -> None:
    """Add the gradients of one kernel call to the sums of its rows and keys."""
    assert arrival.key_grad is not None and arrival.value_grad is not None
    tile, view = call.tile, StridedView.batched if call.kernel.batched else StridedView.view
    queries, keys = (tile.query_rows, tile.query_heads), (tile.key_rows, tile.key_heads)
    query, dout, out = view(rows.q, *queries), view(rows.dout, *queries), view(rows.out, *queries)
    key, value = view(arrival.key, *keys), view(arrival.value, *keys)
    if call.kernel.batched:
        dlse = None if rows.dlse is None else lse_view(rows.dlse).batched(*queries, aligned=False)
        saved = SavedRows(
            dout, out, rows.lse.batched(*queries, aligned=False), None, dlse, _in_place(call, rows.dq, arrival)
        )
    else:
        lse = rows.lse.view(*queries).squeeze(-1)
        saved = SavedRows(dout, out, lse, rows.delta.view(*queries).squeeze(-1) if call.kernel.reads_delta else None)
    dq, dk, dv = kernel_calls.backward(call.kernel, query, key, value, saved, tile, scoring)
    rows.dq.add(*queries, dq)
    arrival.key_grad.add(*keys, dk)
    arrival.value_grad.add(*keys, dv)


def _in_place(call: KernelCall, dq: TensorSum, arrival: Arrival) -> Into:
    """Return the memory of the gradients that a call writes in place."""
    assert arrival.key_grad is not None and arrival.value_grad is not None
    tile, keys = call.tile, (call.tile.key_rows, call.tile.key_heads)
    return (
        dq.place(tile.query_rows, tile.query_heads) if call.queries_in_place else None,
        arrival.key_grad.place(*keys) if call.keys_in_place else None,
        arrival.value_grad.place(*keys) if call.keys_in_place else None,
    )


def output_like(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape, dtype and device of the output, without memory of its own."""
    return q if q.shape[3] == v.shape[3] else q[..., :1].expand(*q.shape[:3], v.shape[3])


def accumulator_for(like: torch.Tensor, sinks: torch.Tensor | None) -> OutputMerge:
    """Return an accumulator for an output of this kind."""
    if not _merges_in_one_pass(like):
        return Accumulator(like, sinks)
    from ring.compute.gpu.gpu_accumulator import CombinedAccumulator  # not at the top: torch for CPUs has no Triton

    return CombinedAccumulator(like, sinks)


def sum_class_for(x: torch.Tensor) -> type[TensorSum]:
    """Return the class that sums gradients of tensors with x's dtype and device."""
    if not _merges_in_one_pass(x):
        return Sum
    from ring.compute.gpu.gpu_accumulator import CombinedSum  # not at the top: torch for CPUs has no Triton

    return CombinedSum


def _merges_in_one_pass(x: torch.Tensor) -> bool:
    """Return True if a GPU kernel merges partial results in one pass: not in fp64, which serves for comparisons, nor
    for more rows of heads than the kernel can count.
    """
    return x.device.type == "cuda" and x.dtype != torch.float64 and x.shape[1] * x.shape[2] <= _MAX_COUNTED
