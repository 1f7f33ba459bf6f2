"""ring_attention as a user calls it, and the same call without its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ring import Transport, ring_attention
from ring.budget import default_bucket
from ring.transport import Message, OwnBuffers, Pending
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

    The first time that it sees a receive buffer it fills it with random numbers: a GPU computes faster with zeros. Not
    in a CUDA graph, where that would be repeated.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._filled: set[tuple[int, int]] = set()  # address and size: a buffer made anew at the same place is filled

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in receives:
            place = message.tensor.data_ptr(), message.bytes
            capturing = message.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
            if place not in self._filled and not capturing:
                message.tensor.normal_()
                self._filled.add(place)
        return _Nothing()

    def unanimous(self, payload: bytes) -> bool:
        return True

    def collect(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size
