"""The plan walked forward and backward.

    Pattern -> Layout -> Plan -> Program -> Exchange -> Kernel -> Accumulator -> output

On GPUs a short call that comes again is replayed as a CUDA graph (`ring.compute.gpu.graph_replay`).

Every partial result is (rows, out, lse), whatever the branch, the source rank, the step or the bucket, and is merged
into one accumulator per query row. The backward of a partial takes its own q, k, v and the global out and lse.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from ring.caching.bounded_cache import BoundedCache
from ring.comm import buffer_meter
from ring.comm.call_order import NumberedCall
from ring.comm.exchange import Arrival, Exchange
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import can_be_captured, transport_of
from ring.comm.transport import Transport
from ring.compute import kernel_counts, kernels
from ring.compute.accumulator import Accumulator, OutputMerge, Sum, TensorSum, lse_view
from ring.compute.gpu import graph_replay
from ring.compute.math_kernel import SavedRows
from ring.consensus import CallSetting
from ring.default_bucket import default_bucket, default_local_bucket
from ring.lowering import KernelCall, Program, Programs
from ring.plan.plan import MOST_BYTES, Plan, plan_of
from ring.precision import accumulator_dtype
from ring.strided_view import GradientSum, StridedView
from ring.validation import Call

_NULL_CONTEXT = nullcontext()
# Rows, and lse's numbers of a sequence: `ring.compute.gpu.merge_kernel` counts them in 32 bits.
_MOST_COUNTED = 2**30
_programs: BoundedCache[CallSetting, Programs] = BoundedCache(128, most_bytes=MOST_BYTES)


@dataclass(eq=False)
class Execution:
    """What forward and backward of one call share."""

    programs: Programs
    transport: Transport
    numbered: NumberedCall
    check: bool


def execution_of(
    call: Call, setting: CallSetting, numbered: NumberedCall, transport: Transport, check: bool
) -> Execution:
    """Of a call that was found right. Programs are kept by the setting, which has all that they are made of."""
    programs = _programs.get_or_make(
        setting,
        lambda: Programs(_plan(call, transport.rank), call.q, call.kernel, call.factor),
        lambda made: made.plan.nbytes,
    )
    return Execution(programs, transport, numbered, check)


def _plan(call: Call, rank: int) -> Plan:
    pattern, layout, q, exchange, bucket = call.pattern, call.layout, call.q, call.exchange, call.bucket
    heads, kv_heads, own = q.shape[2], call.k.shape[2], None
    varlen = kernels.max_varlen_tokens(call.kernel, q.device, q.dtype, q.shape[3], call.factor)
    if bucket is None:
        bucket = default_bucket(layout, heads, kv_heads, q.dtype, q.device.type)
        own = default_local_bucket(q, bucket)
    return plan_of(pattern, layout, rank, heads, kv_heads, exchange, bucket, own, varlen)


def forward(
    execution: Execution, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): like q, and (B, H, N) in the accumulator's type."""
    batch, tokens, heads, _ = q.shape
    program = execution.programs.forward
    guard = (
        _NULL_CONTEXT
        if execution.transport.world_size == 1
        else execution.numbered.calls.guard(execution.numbered.forward)
    )
    if not (q.is_cuda and _is_replayed(execution, program, q)):
        return _forward(execution, program, guard, q, k, v)
    results = ((q.shape, q.dtype), ((batch, heads, tokens), accumulator_dtype(q.dtype)))
    compute = partial(_forward, execution, program, _NULL_CONTEXT)
    with guard:
        out, lse = graph_replay.replayed(_graph_key(execution, program), (q, k, v), results, compute)
    return out, lse


def _forward(
    execution: Execution,
    program: Program,
    guard: AbstractContextManager[object],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    accumulator, queries, scale = accumulator_for(q), StridedView(q), execution.programs.scale
    with guard:
        exchange = Exchange(execution.programs.plan, execution.transport, k, v)
        for arrival, calls in zip(exchange.arrivals(), program.arrivals, strict=True):
            for call in calls:
                tile, view = call.tile, StridedView.batched if call.batched else StridedView.view
                query = view(queries, tile.query_rows, tile.query_heads)
                key = view(arrival.key, tile.key_rows, tile.key_heads)
                value = view(arrival.value, tile.key_rows, tile.key_heads)
                out, lse = kernels.forward(call.kernel, query, key, value, tile, scale)
                accumulator.merge(tile.query_rows, tile.query_heads, out, lse)
    return accumulator.result(q.dtype)


def backward(
    execution: Execution,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Sequence[torch.Tensor]:
    """(dq, dk, dv), like q, k, v."""
    repeatable = q.is_cuda and torch.are_deterministic_algorithms_enabled()  # on CPUs all kernels are
    program = execution.programs.backward(q, dlse is not None, repeatable)
    given = (q, k, v, out, lse, dout)
    guard = (
        _NULL_CONTEXT
        if execution.transport.world_size == 1
        else execution.numbered.calls.guard(execution.numbered.current_backward)
    )
    if not (q.is_cuda and _is_replayed(execution, program, q)):
        return _backward(execution, program, guard, dlse, *given)
    results = tuple((x.shape, q.dtype) for x in (q, k, v))
    compute = partial(_backward, execution, program, _NULL_CONTEXT, dlse)
    with guard:
        return graph_replay.replayed(_graph_key(execution, program), given, results, compute)


def _backward(
    execution: Execution,
    program: Program,
    guard: AbstractContextManager[object],
    dlse: torch.Tensor | None,
    *given: torch.Tensor,
) -> list[torch.Tensor]:
    q, k, v, out, lse, dout = given
    sums = sum_class_for(q)
    dq, dk, dv = sums(q), sums(k), sums(v)
    rows = _QueryRows(StridedView(q), StridedView(dout), StridedView(out), lse_view(lse), dlse, dq)
    with guard:
        exchange = Exchange(execution.programs.plan, execution.transport, k, v)
        for arrival, calls in zip(exchange.round_trips(dk, dv), program.arrivals, strict=True):
            for call in calls:
                _add_gradients(execution, call, arrival, rows)
        grads = sums.results([dq], q.dtype)  # while the last gradients of keys are in flight
        exchange.last_returned(dk, dv)
        grads += sums.results([dk, dv], q.dtype)
        exchange.finish()
    return grads


@dataclass(eq=False)
class _QueryRows:
    """The own query rows in backward."""

    q: StridedView
    dout: StridedView
    out: StridedView
    lse: StridedView
    dlse: torch.Tensor | None
    dq: GradientSum

    @cached_property
    def delta(self) -> StridedView:
        """rowsum(dout out) - dlse; only the math kernel takes it, fused kernels compute it themselves."""
        work = accumulator_dtype(self.q.x.dtype)
        delta = (self.dout.x.to(work) * self.out.x.to(work)).sum(-1).transpose(1, 2)  # (B, H, N)
        return lse_view(delta if self.dlse is None else delta - self.dlse)


def _add_gradients(execution: Execution, call: KernelCall, arrival: Arrival, rows: _QueryRows) -> None:
    """Those that a kernel call gives, to the sums of its rows and keys."""
    assert arrival.key_grad is not None and arrival.value_grad is not None
    tile, view = call.tile, StridedView.batched if call.batched else StridedView.view
    where, of_keys = (tile.query_rows, tile.query_heads), (tile.key_rows, tile.key_heads)
    query, dout, out = view(rows.q, *where), view(rows.dout, *where), view(rows.out, *where)
    key, value = view(arrival.key, *of_keys), view(arrival.value, *of_keys)
    if call.batched:
        saved = SavedRows(dout, out, rows.lse.batched(*where, aligned=False), None)
    else:
        lse = rows.lse.view(*where).squeeze(-1)
        saved = SavedRows(dout, out, lse, rows.delta.view(*where).squeeze(-1) if call.kernel == "math" else None)
    dq, dk, dv = kernels.backward(call.kernel, query, key, value, saved, tile, execution.programs.scale)
    rows.dq.add(*where, dq)
    arrival.key_grad.add(*of_keys, dk)
    arrival.value_grad.add(*of_keys, dv)


def select_transport(q: torch.Tensor, transport: Transport) -> Transport:
    """The fastest way over the same group between tensors like q. On GPUs the first call is collective."""
    return transport_of(transport.group) if q.is_cuda and isinstance(transport, ProcessGroupTransport) else transport


def _graph_key(execution: Execution, program: Program) -> Hashable:
    """All but the tensors that decides what a graph does. Transports of one rank are alike, and may be new ones."""
    return program, execution.transport if execution.transport.world_size > 1 else None


def _is_replayed(execution: Execution, program: Program, q: torch.Tensor) -> bool:
    """Whether a graph may take the place of the call, which is on a GPU: it is short, all by fused kernels and without
    messages of NCCL's, and nobody captures it or counts what it does.
    """
    if not (program.batched and q.nbytes <= graph_replay.MOST_BYTES and can_be_captured(execution.transport)):
        return False
    return not (kernel_counts.counting() or buffer_meter.measuring() or torch.cuda.is_current_stream_capturing())


def accumulator_for(query: torch.Tensor) -> OutputMerge:
    if not _merges_in_one_pass(query):
        return Accumulator(query)
    from ring.compute.gpu.gpu_accumulator import (
        CombinedAccumulator,  # here, because torch for CPUs comes without Triton
    )

    return CombinedAccumulator(query)


def sum_class_for(x: torch.Tensor) -> type[TensorSum]:
    """The kind of sums for gradients of tensors of x's type and device."""
    if not _merges_in_one_pass(x):
        return Sum
    from ring.compute.gpu.gpu_accumulator import CombinedSum  # here, because torch for CPUs comes without Triton

    return CombinedSum


def _merges_in_one_pass(x: torch.Tensor) -> bool:
    """Whether partial results are merged in one pass: on GPUs, except in fp64, which serves for comparisons, and where
    there are more rows of heads than the kernel can count.
    """
    return x.device.type == "cuda" and x.dtype != torch.float64 and x.shape[1] * x.shape[2] <= _MOST_COUNTED
