"""Executes a plan, forward and backward.

    Pattern -> Layout -> Plan -> Program -> Exchange -> Kernel -> Accumulator -> output

On GPUs a short call that repeats is replayed as a CUDA graph (`ring.compute.gpu.graph_replay`).

Every partial result is (rows, out, lse), for any branch, source rank, step and bucket, and is merged into one
accumulator per query row. The backward of a partial uses its own q, k, v and the global out and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ring import all_to_all
from ring.all_to_all import HeadProgram, HeadPrograms, bucket_of, head_programs, programs_of
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
from ring.compute.math_kernel import Into, SavedRows
from ring.compute.scores import Scores
from ring.consensus import CallSetting
from ring.lowering import KernelCall, Program, Programs
from ring.plan.head_groups import head_groups
from ring.plan.plan import MAX_BYTES
from ring.precision import accumulator_dtype
from ring.strided_view import StridedView
from ring.validation import Call

# Limit on query rows times heads: `ring.compute.gpu.merge_kernel` counts them in 32 bits.
_MAX_COUNTED = 2**30
# Products of dout and out in memory at a time: as a whole, in fp32, they would be the largest tensors of a backward.
_PRODUCTS = 2**24
_programs: BoundedCache[CallSetting, Programs | HeadPrograms] = BoundedCache(128, most_bytes=MAX_BYTES)


@dataclass(eq=False)
class Execution:
    """The state that forward and backward of one call share."""

    programs: Programs | HeadPrograms
    transport: Transport
    numbered: NumberedCall
    check: bool


def execution_of(
    call: Call, setting: CallSetting, numbered: NumberedCall, transport: Transport, check: bool
) -> Execution:
    """Return the execution of a validated call. Its programs are cached on its setting, which determines them."""

    def made() -> Programs | HeadPrograms:
        return _programs_of(replace(call, exchange=setting.exchange), transport)

    programs = _programs.get_or_make(setting, made, lambda programs: programs.nbytes)
    return Execution(programs, transport, numbered, check)


@_disable_current_modes()  # selective checkpointing wants the same operators in a recomputation, which finds a plan
def _programs_of(call: Call, transport: Transport) -> Programs | HeadPrograms:
    groups = head_groups(call.exchange, transport.world_size)
    if groups is not None and groups.degree > 1:
        return head_programs(call, groups, transport.rank)
    exchange = call.exchange if groups is None else groups.between
    return programs_of(call, exchange, transport.rank, bucket_of(call), call.layout, call.key_layout)


def forward(
    run: Execution, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse): out like q with the head dim of v, lse (B, H, N) in the accumulator's dtype."""
    batch, tokens, heads, _ = q.shape
    programs, transport = run.programs, run.transport
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _forward_by_head if programs.by_head else _forward
    if not (q.is_cuda and _is_replayed(transport, programs.forward, q)):
        return compute(programs, transport, q, k, v, sinks)
    results = (((batch, tokens, heads, v.shape[3]), q.dtype), ((batch, heads, tokens), accumulator_dtype(q.dtype)))
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    key = _graph_key(transport, programs.forward, inputs)
    out, lse = graph_replay.replayed(key, inputs, results, partial(compute, programs, transport))
    return out, lse


def _forward(
    programs: Programs,
    transport: Transport,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    like = q if q.shape[3] == v.shape[3] else _output_like(q, v)
    accumulator, queries, scoring = accumulator_for(like, sinks), StridedView(q), programs.scoring
    exchange = Exchange(programs.plan, transport, k, v)
    for arrival, calls in zip(exchange.arrivals(), programs.forward.arrivals, strict=True):
        for call in calls:
            tile, view = call.tile, StridedView.batched if call.batched else StridedView.view
            query = view(queries, tile.query_rows, tile.query_heads)
            key = view(arrival.key, tile.key_rows, tile.key_heads)
            value = view(arrival.value, tile.key_rows, tile.key_heads)
            out, lse = kernels.forward(call.kernel, query, key, value, tile, scoring)
            accumulator.merge(tile.query_rows, tile.query_heads, out, lse)
    return accumulator.result(q.dtype)


def _forward_by_head(
    programs: HeadPrograms, transport: Transport, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    def compute(stage: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _forward(*programs.block(transport, stage), *tensors)

    return all_to_all.forward(programs, transport, compute, q, k, v, sinks)


def backward(
    run: Execution,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Sequence[torch.Tensor]:
    """Return (dq, dk, dv), like q, k, v, and with sinks their gradient: the sum over the own rows."""
    programs, transport = run.programs, run.transport
    compute: Callable[..., list[torch.Tensor]] = _backward_by_head if programs.by_head else _backward
    if programs.by_head is True and programs.returns_lse and dlse is None:
        dlse = torch.zeros_like(lse)  # other ranks may have one, so all send it
    through_lse, given_sinks = dlse is not None, () if sinks is None else (sinks,)
    tensors = (q, k, v, out, lse, dout, *(() if dlse is None else (dlse,)), *given_sinks)
    program = programs.backward(q, through_lse)
    if not (q.is_cuda and _is_replayed(transport, program, q)):
        return compute(programs, transport, program, through_lse, *tensors)
    results = tuple((x.shape, x.dtype) for x in (q, k, v, *given_sinks))
    key = _graph_key(transport, program, tensors)
    return graph_replay.replayed(key, tensors, results, partial(compute, programs, transport, program, through_lse))


def _backward(
    programs: Programs,
    transport: Transport,
    program: Program,
    through_lse: bool,
    *tensors: torch.Tensor,
    wide: bool = False,
) -> list[torch.Tensor]:
    """tensors: q, k, v, out, lse, dout; with `through_lse` dlse; and sinks, if their gradient is wanted. wide: leave
    gradients of keys and values in the accumulator's dtype.
    """
    q, k, v, out, lse, dout, *sinks = tensors
    dlse = sinks.pop(0) if through_lse else None
    sums = sum_class_for(q)
    dq, dk, dv = sums(q), sums(k), sums(v)
    rows = _QueryRows(StridedView(q), StridedView(dout), StridedView(out), lse_view(lse), dlse, dq, (dk, dv))
    exchange = Exchange(programs.plan, transport, k, v)
    for arrival, calls in zip(exchange.round_trips(dk, dv), program.arrivals, strict=True):
        for call in calls:
            _add_gradients(programs.scoring, call, arrival, rows)
    grads = sums.results([dq], q.dtype)  # while the last gradients of keys are in flight
    dsinks = [_sink_gradient(sinks[0], lse, rows.delta)] if sinks else []
    exchange.last_returned(dk, dv)
    grads += sums.results([dk, dv], accumulator_dtype(q.dtype) if wide else q.dtype)
    exchange.finish()
    return grads + dsinks


def _backward_by_head(
    programs: HeadPrograms, transport: Transport, program: HeadProgram, through_lse: bool, *tensors: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    (*shards, out, lse, dout), sinks = tensors[:6], [*tensors[6:]]
    dlse = sinks.pop(0) if through_lse else None

    def compute(stage: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
        block = *programs.block(transport, stage), program.stages[stage]
        return _backward(*block, through_lse, *tensors, wide=programs.sums_keys)

    grads = all_to_all.backward(programs, transport, compute, (*shards, out, lse, dout), dlse)
    return grads + [_sink_gradient(x, lse, _delta(dout, out, dlse)) for x in sinks]


@dataclass(eq=False)
class _QueryRows:
    """The local query rows in backward, and the sums of the gradients of own keys and values."""

    q: StridedView
    dout: StridedView
    out: StridedView
    lse: StridedView
    dlse: torch.Tensor | None
    dq: TensorSum
    own: tuple[TensorSum, TensorSum]

    @cached_property
    def delta(self) -> StridedView:
        """rowsum(dout out) - dlse, for sinks and the math kernel: fused kernels compute it themselves."""
        return _delta(self.dout.x, self.out.x, self.dlse)


def _delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None) -> StridedView:
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


def _sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: StridedView) -> torch.Tensor:
    """Return the sum of e^(sink - lse) (dlse - rowsum(dout out)) over the own rows of each head, (H,). lse: (B, H, N).

    The value of a sink is 0, so its score's gradient P (dO V^T - delta) is -P delta.
    """
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    grad = -(weights * delta.x.squeeze(3).transpose(1, 2)).sum((0, 2))
    return grad.masked_fill_(sinks == -torch.inf, 0.0).to(sinks.dtype)  # lse may be -inf too


def _add_gradients(scoring: Scores, call: KernelCall, arrival: Arrival, rows: _QueryRows) -> None:
    """Add the gradients of one kernel call to the sums of its rows and keys."""
    assert arrival.key_grad is not None and arrival.value_grad is not None
    tile, view = call.tile, StridedView.batched if call.batched else StridedView.view
    queries, keys = (tile.query_rows, tile.query_heads), (tile.key_rows, tile.key_heads)
    query, dout, out = view(rows.q, *queries), view(rows.dout, *queries), view(rows.out, *queries)
    key, value = view(arrival.key, *keys), view(arrival.value, *keys)
    if call.batched:
        dlse = None if rows.dlse is None else lse_view(rows.dlse).batched(*queries, aligned=False)
        saved = SavedRows(dout, out, rows.lse.batched(*queries, aligned=False), None, dlse)
    else:
        lse = rows.lse.view(*queries).squeeze(-1)
        saved = SavedRows(dout, out, lse, rows.delta.view(*queries).squeeze(-1) if call.kernel == "math" else None)
    into = _in_place(call, rows) if call.queries_in_place or call.keys_in_place else None
    dq, dk, dv = kernels.backward(call.kernel, query, key, value, saved, tile, scoring, into)
    rows.dq.add(*queries, dq)
    arrival.key_grad.add(*keys, dk)
    arrival.value_grad.add(*keys, dv)


def _in_place(call: KernelCall, rows: _QueryRows) -> Into:
    """Return the memory of the gradients that a call writes in place."""
    tile, (dk, dv) = call.tile, rows.own
    keys = tile.key_rows, tile.key_heads
    return (
        rows.dq.place(tile.query_rows, tile.query_heads) if call.queries_in_place else None,
        dk.place(*keys) if call.keys_in_place else None,
        dv.place(*keys) if call.keys_in_place else None,
    )


def select_transport(q: torch.Tensor, transport: Transport) -> Transport:
    """Return the fastest transport over the same group for tensors like q. On GPUs the first call is collective."""
    if q.is_cuda and isinstance(transport, ProcessGroupTransport):
        return transport_of(transport.group)
    return transport


def _graph_key(transport: Transport, program: Program | HeadProgram, tensors: Sequence[torch.Tensor]) -> Hashable:
    """The key of a captured graph: everything but the tensors. Transports of one rank are interchangeable. A backward
    takes sinks only where their gradient is wanted.
    """
    return program, transport if transport.world_size > 1 else None, len(tensors)


def _is_replayed(transport: Transport, program: Program | HeadProgram, q: torch.Tensor) -> bool:
    """Return True if a graph may replay this GPU call: it is short, uses only fused kernels and no NCCL messages, and
    no capture, `count_kernels` or `measure` is active.
    """
    if not (program.batched and q.nbytes <= graph_replay.MOST_BYTES and can_be_captured(transport)):
        return False
    return not (kernel_counts.counting() or buffer_meter.measuring() or torch.cuda.is_current_stream_capturing())


def _output_like(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape, dtype and device of the output, without memory of its own."""
    return q[..., :1].expand(*q.shape[:3], v.shape[3])


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
