"""The plan walked forward and backward.

    Pattern -> Layout -> Plan -> Exchange -> Kernel -> Accumulator -> output

Every partial result is (rows, out, lse), whatever the branch, the source rank, the step or the bucket, and is merged
into one accumulator per query row. The backward of a partial takes its own q, k, v and the global out and lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from ring.agreement import Call
from ring.budget import default_bucket, default_own
from ring.comm.calls import NumberedCall
from ring.comm.exchange import Arrival, Exchange
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import transport_of
from ring.comm.transport import Transport
from ring.compute import kernels
from ring.compute.accumulator import Accumulator, OutputMerge, Sum, lse_view
from ring.compute.math_kernel import SavedRows
from ring.plan.plan import Plan, plan_of
from ring.plan.tile import Tile
from ring.precision import accumulator_dtype
from ring.strided_view import GradientSum, StridedView


@dataclass(frozen=True)
class Walk:
    """What forward and backward of one call share."""

    plan: Plan
    transport: Transport
    kernel: str
    scale: float
    numbered: NumberedCall
    check: bool

    def posting(self, what: str) -> AbstractContextManager[None]:
        """Around what posts messages. what: in which call and direction."""
        return self.numbered.calls.posting(what) if self.transport.world_size > 1 else nullcontext()


def walk_of(call: Call, numbered: NumberedCall, transport: Transport, check: bool) -> Walk:
    """Of a call that was found right."""
    return Walk(_plan(call, transport.rank), transport, call.kernel, call.factor, numbered, check)


def _plan(call: Call, rank: int) -> Plan:
    pattern, layout, q, exchange, bucket = call.pattern, call.layout, call.q, call.exchange, call.bucket
    heads, kv_heads, own = q.shape[2], call.k.shape[2], None
    if bucket is None:
        bucket = default_bucket(layout, heads, kv_heads, q.dtype, q.device.type)
        own = default_own(q, bucket)
    return plan_of(pattern, layout, rank, heads, kv_heads, exchange, bucket, own)


def forward(walk: Walk, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    accumulator, queries = accumulator_for(q), StridedView(q)
    with walk.posting(walk.numbered.forward):
        for arrival in Exchange(walk.plan, walk.transport, k, v).arrivals():
            for tile in arrival.tiles:
                query = queries.view(tile.query_rows, tile.query_heads)
                key, value = _keys(arrival, tile)
                name = kernels.choose(walk.kernel, q.device, q.dtype, q.shape[3], tile, walk.scale)
                out, lse = kernels.forward(name, query, key, value, tile, walk.scale)
                accumulator.merge(tile.query_rows, tile.query_heads, out, lse)
    return accumulator.result(q.dtype)


def backward(
    walk: Walk,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> list[torch.Tensor]:
    dq, dk, dv = (sum_for(x) for x in (q, k, v))
    rows = _QueryRows(StridedView(q), StridedView(dout), StridedView(out), lse_view(lse), dlse, dq)
    exchange = Exchange(walk.plan, walk.transport, k, v)
    for arrival in exchange.round_trips(dk, dv):
        _tile_gradients(walk, arrival, rows)
    grads = _results((dq,), q)  # while the last gradients of keys are in flight
    exchange.last_returned(dk, dv)
    grads += _results((dk, dv), k)
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


def _tile_gradients(walk: Walk, arrival: Arrival, rows: _QueryRows) -> None:
    assert arrival.key_grad is not None and arrival.value_grad is not None
    q = rows.q.x
    for whole in arrival.tiles:
        name = kernels.choose(
            walk.kernel, q.device, q.dtype, q.shape[3], whole, walk.scale, rows.dlse is not None,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        for tile in kernels.portions(name, whole, q):
            where = (tile.query_rows, tile.query_heads)
            key, value = _keys(arrival, tile)
            saved = SavedRows(
                rows.dout.view(*where), rows.out.view(*where), rows.lse.view(*where).squeeze(-1),
                rows.delta.view(*where).squeeze(-1) if name == "math" else None,
            )  # fmt: skip
            dq, dk, dv = kernels.backward(name, rows.q.view(*where), key, value, saved, tile, walk.scale)
            rows.dq.add(*where, dq)
            arrival.key_grad.add(tile.key_rows, tile.key_heads, dk)
            arrival.value_grad.add(tile.key_rows, tile.key_heads, dv)


def _keys(arrival: Arrival, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    return arrival.key.view(tile.key_rows, tile.key_heads), arrival.value.view(tile.key_rows, tile.key_heads)


def between_gpus(transport: Transport) -> Transport:
    return transport_of(transport.group) if isinstance(transport, ProcessGroupTransport) else transport


def accumulator_for(query: torch.Tensor) -> OutputMerge:
    if not _combines(query):
        return Accumulator(query)
    from ring.compute.gpu.combine import CombinedAccumulator  # here, because torch for CPUs comes without Triton

    return CombinedAccumulator(query)


def sum_for(x: torch.Tensor) -> GradientSum:
    if not _combines(x):
        return Sum(x)
    from ring.compute.gpu.combine import CombinedSum  # here, because torch for CPUs comes without Triton

    return CombinedSum(x)


def _results(sums: Sequence[GradientSum], x: torch.Tensor) -> list[torch.Tensor]:
    """The results of sums that were made for tensors like x, in the type of x."""
    if not _combines(x):
        return [one.result(x.dtype) for one in sums]
    from ring.compute.gpu.combine import results  # here, because torch for CPUs comes without Triton

    return results(sums, x.dtype)


def _combines(x: torch.Tensor) -> bool:
    """Whether partial results are merged in one pass: on GPUs, except in fp64, which serves for comparisons."""
    return x.device.type == "cuda" and x.dtype != torch.float64
