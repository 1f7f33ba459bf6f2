"""ring_attention, on all heads or on some at a time, and the same call without messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bench.workload import Contender, Inputs, Results, Workload
from ring import Transport, ring_attention
from ring.comm.call_order import Calls
from ring.comm.transport import LocalBuffers, Message, Pending, Put
from ring.default_bucket import default_bucket


def bucket_of(workload: Workload, bucket: int | None, device: torch.device) -> int:
    """Return the bucket in tokens; None: ring_attention's default."""
    if bucket is not None:
        return bucket
    return default_bucket(workload.layout, workload.shape.query, workload.shape.kv, workload.dtype, device.type)


def ring(
    workload: Workload, inputs: Sequence[Inputs], exchange: str, bucket: int | None, check: bool,
    transport: Transport | None = None,
) -> Contender:  # fmt: skip
    """Make calls of ring_attention, forward all and then backward all. inputs: of each call: of some heads at a time as
    from projections of these alone, so that nothing is sliced. transport: None for the default process group. check:
    the ranks agree on the call first, and the host waits."""
    leaves, douts = [x for q, k, v, _ in inputs for x in (q, k, v)], [dout for *_, dout in inputs]
    options: dict[str, Any] = {"group": transport, "exchange": exchange, "bucket": bucket, "check": check}

    def attend() -> list[Tensor]:
        calls = (ring_attention(q, k, v, workload.pattern, workload.layout, **options) for q, k, v, _ in inputs)
        return [cast(Tensor, out) for out in calls]

    def forward() -> Results:
        with torch.no_grad():
            return tuple(attend())

    def training() -> Results:
        outs = attend()
        return *(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, douts)

    return Contender(forward, training, capturable=not check)


def without_messages(workload: Workload, inputs: Inputs, rank: int, exchange: str, bucket: int | None) -> Contender:
    """Make the same call without messages, on whatever its receive buffers contain. The difference in time is the
    part of the exchange that computation does not hide."""
    contender = ring(workload, [inputs], exchange, bucket, False, Silent(rank, workload.world))
    return replace(contender, local=True)


class _NeverSent:
    """A message that was never sent, so that waiting returns at once."""

    def arrive(self) -> None: ...

    def wait(self) -> None: ...


class Silent(LocalBuffers):
    """A transport that sends nothing, to time the rest of a call.

    Buffers are filled with random numbers: a GPU computes faster with zeros. They are cached: a CUDA graph would
    otherwise allocate new ones with undefined content.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.calls = rank, world_size, Calls()
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        key = name, tuple(shape), dtype
        if key not in self._buffers:
            self._buffers[key] = super().empty(name, shape, dtype, device).normal_()
        return self._buffers[key]

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return _NeverSent()

    @property
    def one_sided(self) -> bool:
        return True

    def put(self, puts: Sequence[Put], receives: Sequence[Message]) -> Pending:
        return _NeverSent()

    def all_equal(self, payload: bytes) -> bool:
        return True

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size
