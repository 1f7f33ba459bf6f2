"""ring_attention as a user calls it, and the same call without its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ring import Transport, ring_attention
from ring.budget import default_bucket
from ring.comm.transport import Message, OwnBuffers, Pending
from verification.benchmarks.contender import Contender, Inputs
from verification.benchmarks.settings import Problem


def bucket_of(problem: Problem, bucket: int | None, device: torch.device) -> int:
    """Tokens: as given, or what ring_attention chooses by itself."""
    if bucket is not None:
        return bucket
    return default_bucket(problem.layout, problem.heads.query, problem.heads.kv, problem.dtype, device.type)


def ring(
    problem: Problem, inputs: Inputs, exchange: str, kernel: str, bucket: int | None, check: bool,
    transport: Transport | None = None,
) -> Contender:  # fmt: skip
    """transport: None for the default process group. check: whether the ranks agree on the call before it begins,
    which a GPU waits for."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_attention(
            q, k, v, problem.pattern, problem.layout,
            group=transport, exchange=exchange, kernel=kernel, bucket=bucket, check=check,
        )  # fmt: skip
        return cast(Tensor, out)

    return Contender.of(attend, inputs, capturable=not check)


def without_messages(
    problem: Problem, inputs: Inputs, rank: int, exchange: str, kernel: str, bucket: int | None
) -> Contender:
    """The tiles, the packing and the merges of the call, on what the landing buffers happen to hold. What the call
    takes longer is what its exchange costs that nothing hides."""
    silent = Silent(rank, problem.world)
    contender = ring(problem, inputs, exchange, kernel, bucket, False, silent)
    return Contender(contender.forward, contender.training, local=True, capturable=True)


class _Nothing:
    """There is nothing to wait for."""

    def arrive(self) -> None: ...

    def wait(self) -> None: ...


class Silent(OwnBuffers):
    """A transport over which nothing is sent, for timing what is left.

    Its buffers hold random numbers from the start, for a GPU computes faster with zeros, and are kept: those of a CUDA
    graph would be new, and hold whatever was there.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        key = name, tuple(shape), dtype
        if key not in self._buffers:
            self._buffers[key] = super().empty(name, shape, dtype, device).normal_()
        return self._buffers[key]

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return _Nothing()

    def unanimous(self, payload: bytes) -> bool:
        return True

    def collect(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size
