"""Executes a call, forward and backward: block of heads by block of heads.

    heads given to the ranks that compute them -> attention of a block -> results given back

Where ranks divide the heads of their rows, rows of the next block, and results of the one before, are in flight while a
block is computed (`ring.comm.head_exchange`). Otherwise there is one block, the call's own tensors. Backward the owners
send q, k, v, the output and lse again, so nothing is kept for it. Gradients of keys are summed over the blocks that had
their head; where some head was in several, they travel in the accumulator's dtype.

By "direct-kept" a forward that will have a backward returns the keys that it received, and backward takes them; by
"all-to-all-kept" q, k, v, the output and lse of the own heads, so that only gradients travel in the backward.

On GPUs a short call that repeats is replayed as a CUDA graph (`ring.compute.gpu.graph_replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ring import attend, attend_parts
from ring.adjacent import Form
from ring.attend import row_delta
from ring.caching.bounded_cache import BoundedCache
from ring.comm import buffer_meter
from ring.comm.call_order import NumberedCall
from ring.comm.exchange import make_slot, received_slots
from ring.comm.head_exchange import Compute, Given, HeadExchange, Rows
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import can_be_captured, transport_of
from ring.comm.transport import Transport
from ring.compute import kernel_counts
from ring.compute.gpu import graph_replay
from ring.consensus import CallSetting
from ring.lowering import BlockPrograms
from ring.plan.plan import MAX_BYTES
from ring.precision import accumulator_dtype
from ring.programs import CallProgram, Programs, make_programs
from ring.strided_view import StridedView
from ring.validation import Call

_programs: BoundedCache[CallSetting, Programs] = BoundedCache(128, most_bytes=MAX_BYTES)


@dataclass(eq=False)
class Execution:
    """The state that forward and backward of one call share. keeps: the forward keeps the keys that it receives."""

    programs: Programs
    transport: Transport
    numbered: NumberedCall
    check: bool
    keeps: bool


def execution_of(call: Call, setting: CallSetting, numbered: NumberedCall, transport: Transport) -> Execution:
    """Return the execution of a validated call. Its programs are cached on its setting, which determines them."""

    make = partial(_make, call, setting.exchange, transport.rank)
    programs = _programs.get_or_make(setting, make, lambda programs: programs.nbytes)
    keeps = setting.exchange.kept and call.differentiated
    return Execution(programs, transport, numbered, call.settings.check, keeps)


# Selective checkpointing wants the same operators in a recomputation, which finds a plan.
_make = _disable_current_modes()(make_programs)


def forward(
    run: Execution, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return (out, lse, kept): out like q with the head dim of v, lse (B, H, N) in the accumulator's dtype, received
    keys that are kept for the backward, if any.
    """
    programs, transport = run.programs, run.transport
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    compute = partial(_forward, programs, transport, run.keeps)
    if q.is_cuda and _is_replayed(transport, programs.forward, q):
        out, lse, *kept = graph_replay.replayed(
            _graph_key(transport, programs.forward, inputs, run.keeps), inputs, compute
        )
    else:
        out, lse, *kept = compute(*inputs)
    return out, lse, kept


def _forward(
    programs: Programs, transport: Transport, keeps: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Return out, lse and the keys that are kept, if any."""
    if not programs.divides_heads:
        block, ranks = programs.block(transport, 0)
        results: list[torch.Tensor] = _attend(block).forward(block, ranks, q, k, v, sinks, keeps)
        return results
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, tokens, heads, 1, dtype=accumulator_dtype(q.dtype))
    place, kept = programs.dividing.index(transport.rank), list[torch.Tensor]()
    exchange = HeadExchange(transport, programs.dividing, programs.stages)

    def compute(stage: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        heads = programs.stages[stage][place].queries
        (block, ranks), (q, k, v) = programs.block(transport, stage), tensors
        own_sinks = None if sinks is None else sinks[heads.start : heads.stop]
        out, lse = _attend(block).forward(block, ranks, q, k, v, own_sinks)
        if keeps:
            kept.extend((*exchange.keep(tensors), out, lse))
            exchange.hold((out, lse))
        return out, _as_rows(lse)

    of_queries, of_keys = _rows(programs)
    shards = [(of_queries("queries"), q), (of_keys("keys"), k), (of_keys("values"), v)]
    wanted = [(of_queries("output"), out), (of_queries("lse"), lse)]
    _by_heads(exchange, programs, transport, "forward", (q, k, v), shards, wanted, compute)
    return out, _as_lse(lse).contiguous(), *kept


def kept_forms(run: Execution, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Form]:
    """Return the shapes and types of the tensors that the forward kept."""
    programs = run.programs
    if not run.keeps:
        return []
    if not programs.divides_heads:
        block, _ = programs.block(run.transport, 0)
        return [((sum(received_slots(block.plan)), make_slot(k, v).numbers), k.dtype)]
    batch, place, forms = q.shape[0], programs.dividing.index(run.transport.rank), list[Form]()
    rows, key_rows = (sum(of("").counts) for of in _rows(programs))
    for heads, kv_heads in ((len(stage[place].queries), len(stage[place].keys)) for stage in programs.stages):
        if heads:
            forms.append(((batch, rows, heads, q.shape[3]), q.dtype))
            forms += [((batch, key_rows, kv_heads, x.shape[3]), x.dtype) for x in (k, v)]
            forms.append(((batch, rows, heads, v.shape[3]), q.dtype))
            forms.append(((batch, heads, rows), accumulator_dtype(q.dtype)))
    return forms


def _attend(block: BlockPrograms) -> ModuleType:
    return attend_parts if block.plan.chunked else attend


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
    *,
    kept: Sequence[torch.Tensor] = (),
) -> Sequence[torch.Tensor]:
    """Return (dq, dk, dv), like q, k, v, and with sinks their gradient: the sum over the own rows. kept: as the forward
    returned it.
    """
    programs, transport = run.programs, run.transport
    kept = [x.contiguous() for x in kept]  # hooks of saved tensors may return other strides
    if programs.divides_heads and programs.returns_lse and dlse is None:
        dlse = torch.zeros_like(lse)  # other ranks may have one, so all send it
    through_lse, given_sinks = dlse is not None, () if sinks is None else (sinks,)
    tensors = (*kept, q, k, v, out, lse, dout, *(() if dlse is None else (dlse,)), *given_sinks)
    program = programs.backward(q, through_lse)
    compute = partial(_backward, transport, program, through_lse, len(kept))
    if not (q.is_cuda and _is_replayed(transport, program, q)):
        return compute(*tensors)
    return graph_replay.replayed(_graph_key(transport, program, tensors, run.keeps), tensors, compute)


def _backward(
    transport: Transport, program: CallProgram, through_lse: bool, count: int, *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """tensors: as many kept ones as `count`; q, k, v, out, lse, dout; with `through_lse` dlse; and sinks, if their
    gradient is wanted.
    """
    kept, tensors = tensors[:count], tensors[count:]
    (*shards, out, lse, dout), sinks = tensors[:6], [*tensors[6:]]
    dlse, programs = sinks.pop(0) if through_lse else None, program.programs
    if programs.divides_heads:
        grads = _backward_by_heads(transport, program, shards, (out, lse, dout), dlse, kept)
    else:
        block, ranks = programs.block(transport, 0)
        grads = _attend(block).backward(block, ranks, program.blocks[0], tensors[:6], dlse, False, *kept)
    return grads + [_sink_gradient(x, lse, row_delta(dout, out, dlse)) for x in sinks]


def _backward_by_heads(
    transport: Transport, program: CallProgram, shards: Sequence[torch.Tensor], saved: Sequence[torch.Tensor],
    dlse: torch.Tensor | None, kept: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of the own rows. shards: q, k, v. saved: out, lse, dout. kept: q, k, v, out and lse of each
    stage with heads, by "all-to-all-kept".
    """
    (q, k, v), (out, lse, dout), programs = shards, saved, program.programs
    of_queries, of_keys = _rows(programs)
    exchange, of_stages = HeadExchange(transport, programs.dividing, programs.stages), iter(kept)
    exchange.hold(kept)
    given = []
    if not programs.exchange.keeps_heads:
        given += [(of_queries("queries"), q), (of_keys("keys"), k), (of_keys("values"), v), (of_queries("output"), out)]
        given.append((of_queries("lse"), _as_rows(lse)))
    given.append((of_queries("gradients of output"), dout))
    if dlse is not None:
        given.append((of_queries("gradients of lse"), _as_rows(dlse)))
    summed = programs.sums_keys
    work = accumulator_dtype(q.dtype) if summed else q.dtype
    new = torch.zeros_like if summed else torch.empty_like
    dq, dk, dv = torch.empty_like(q), new(k, dtype=work), new(v, dtype=work)

    def compute(stage: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        q, k, v, out, lse, dout, *dlse = (*islice(of_stages, 5), *tensors)
        block, ranks = programs.block(transport, stage)
        through = _as_lse(dlse[0]) if dlse else None
        saved = q, k, v, out, lse if kept else _as_lse(lse), dout
        return _attend(block).backward(block, ranks, program.blocks[stage], saved, through, wide=summed)

    wanted = [(of_queries("gradients of queries"), dq)]
    wanted += [(of_keys("gradients of keys", summed), dk), (of_keys("gradients of values", summed), dv)]
    _by_heads(exchange, programs, transport, "backward", (q, k, v), given, wanted, compute)
    return [dq, dk.to(k.dtype), dv.to(v.dtype)]


def _rows(programs: Programs) -> tuple[Callable[..., Rows], Callable[..., Rows]]:
    """Return what describes tensors with rows of queries, and of keys, by their label."""

    def of_queries(label: str) -> Rows:
        return Rows(label, programs.places, of_keys=False)

    def of_keys(label: str, summed: bool = False) -> Rows:
        return Rows(label, programs.key_places, of_keys=True, summed=summed)

    return of_queries, of_keys


def _by_heads(
    exchange: HeadExchange, programs: Programs, transport: Transport, direction: str, shards: Sequence[torch.Tensor],
    given: Given, wanted: Given, compute: Compute,
) -> None:  # fmt: skip
    """Run all stages of a call. shards: q, k, v."""
    q, k, v = shards
    key = programs.setting, direction, len(given), q.dtype, make_slot(k, v)
    exchange.run(key, given, wanted, compute, lambda: programs.outgoing(transport, direction, k, v))


def _as_rows(lse: torch.Tensor) -> torch.Tensor:
    """View (B, H, N) as (B, N, H, 1)."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _as_lse(rows: torch.Tensor) -> torch.Tensor:
    """View (B, N, H, 1) as (B, H, N)."""
    return rows.squeeze(-1).transpose(1, 2)


def _sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: StridedView) -> torch.Tensor:
    """Return the sum of e^(sink - lse) (dlse - rowsum(dout out)) over the own rows of each head, (H,). lse: (B, H, N).

    The value of a sink is 0, so its score's gradient P (dO V^T - delta) is -P delta.
    """
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    grad = -(weights * delta.x.squeeze(3).transpose(1, 2)).sum((0, 2))
    return grad.masked_fill_(sinks == -torch.inf, 0.0).to(sinks.dtype)  # lse may be -inf too


def select_transport(q: torch.Tensor, transport: Transport) -> Transport:
    """Return the fastest transport over the same group for tensors like q. On GPUs the first call is collective."""
    if q.is_cuda and isinstance(transport, ProcessGroupTransport):
        return transport_of(transport.group)
    return transport


def _graph_key(transport: Transport, program: CallProgram, tensors: Sequence[torch.Tensor], keeps: bool) -> Hashable:
    """The key of a captured graph: everything but the tensors. Transports of one rank are interchangeable. A backward
    takes sinks only where their gradient is wanted. keeps: keys are kept in this call.
    """
    return program, transport if transport.world_size > 1 else None, len(tensors), keeps


def _is_replayed(transport: Transport, program: CallProgram, q: torch.Tensor) -> bool:
    """Return True if a graph may replay this GPU call: it is short, uses only fused kernels and no NCCL messages, and
    no capture, `count_kernels` or `measure` is active.
    """
    if not (program.batched and q.nbytes <= graph_replay.MOST_BYTES and can_be_captured(transport)):
        return False
    return not (kernel_counts.counting() or buffer_meter.measuring() or torch.cuda.is_current_stream_capturing())
