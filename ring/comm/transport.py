"""Moving tensors between the ranks of a group: post a batch of sends and receives, wait for it.

A transport knows nothing of attention. Its contract, which a simulated one may use to the full:
- a send reads its tensor at any time between `post` and the end of `wait`: do not change it before;
- a receive writes its tensor at any time between `post` and the end of `wait`: neither read nor write it before;
- messages from one rank to another match in the order in which they were posted, and have the receive's exact size;
- nothing is sent to oneself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Message:
    """A contiguous tensor to send to, or to receive from, a peer (rank in the group). `label` says what it is."""

    peer: int
    tensor: torch.Tensor
    label: str

    @property
    def bytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True)
class Outgoing:
    """A message that a call will send: bytes start .. stop - 1 of one of its buffers, which has `size` bytes."""

    buffer: str
    size: int
    label: str
    peer: int
    start: int
    stop: int


class Pending(Protocol):
    """A posted batch."""

    def arrive(self) -> None:
        """Return when every receive is there; the buffers of the sends may still be read."""

    def wait(self) -> None:
        """Return when every send was read too, and every receive is there."""


@runtime_checkable
class Transport(Protocol):
    """The ranks of one group, seen from one of them."""

    rank: int
    world_size: int

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start a batch of messages; an empty batch is allowed."""
        ...

    def all_equal(self, payload: bytes) -> bool:
        """Whether all ranks gave the same bytes; every rank calls it, with equally many, a multiple of 8."""
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks in rank order; every rank calls it, with equally many bytes."""
        ...

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Before the buffers of a call are asked for. key: what kind of call, the same on every rank."""
        ...

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the call, its contents arbitrary; valid until the call ends."""
        ...


class OwnBuffers(Transport):
    """Buffers of one's own, which is what most transports send from."""

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Nothing to prepare."""

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)


def all_gather_json(value: object, transport: Transport) -> list[Any]:
    """Everyone's value, which JSON can say, in rank order. Every rank calls it."""
    mine = json.dumps(value).encode()
    lengths = [int.from_bytes(other, "little") for other in transport.all_gather(len(mine).to_bytes(8, "little"))]
    padded = transport.all_gather(mine.ljust(max(lengths)))
    return [json.loads(words[:length]) for words, length in zip(padded, lengths, strict=True)]


class _Works:
    """Handles of one batch, kept with the tensors until it is done: a dropped handle may lose its message. Each is
    waited for once: gloo hangs in a second wait.
    """

    def __init__(self, sends: Sequence[dist.Work], receives: Sequence[dist.Work], messages: Sequence[Message]) -> None:
        self._sends, self._receives, self._messages = sends, receives, messages

    def arrive(self) -> None:
        for work in self._receives:
            work.wait()
        self._receives = ()

    def wait(self) -> None:
        self.arrive()
        for work in self._sends:
            work.wait()
        self._sends, self._messages = (), ()


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """By type of device, {"cuda": "nccl"}; None: of the default group. The name of a group's backend does not tell: of
    a group that was made without any, torch says "undefined".
    """
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


class ProcessGroupTransport(OwnBuffers):
    """A torch process group (gloo or NCCL), the whole world or part of it; peers are ranks of the group.

    Raises ValueError on a process that is not a member.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(f"group must contain the calling process; world rank {dist.get_rank()} is not a member")
        self.world_size = dist.get_world_size(self.group)
        self._on_gpu = "cpu" not in backends_of(self.group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for message in (*sends, *receives):
            _check(message, self.rank, self.world_size)
        # On GPUs in one group: NCCL would run sends and receives one after the other, and may deadlock. By the tensors:
        # the name of the backend does not tell it of a group that has one for each type of device.
        if any(message.tensor.is_cuda for message in (*sends, *receives)):
            operations = [dist.P2POp(dist.isend, m.tensor, group=self.group, group_peer=m.peer) for m in sends]
            operations += [dist.P2POp(dist.irecv, m.tensor, group=self.group, group_peer=m.peer) for m in receives]
            return _Works((), dist.batch_isend_irecv(operations), (*sends, *receives))
        found = [dist.irecv(m.tensor, group=self.group, group_src=m.peer) for m in receives]
        found += [dist.isend(m.tensor, group=self.group, group_dst=m.peer) for m in sends]
        works = [work for work in found if work is not None]
        assert len(works) == len(sends) + len(receives)
        return _Works(works[len(receives) :], works[: len(receives)], (*sends, *receives))

    def all_equal(self, payload: bytes) -> bool:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.int64)
        both = torch.cat((mine, ~mine))
        with self._aside():
            greatest = both.to(self._device(), copy=True)  # of the complements too: theirs is that of the least
            dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self.group)
            return torch.equal(greatest.cpu(), both)

    def all_gather(self, payload: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device())
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        return [theirs.cpu().numpy().tobytes() for theirs in everyone]

    def _aside(self) -> AbstractContextManager[object]:
        """On GPUs a stream of its own: what ranks ask each other waits for no kernel."""
        return torch.cuda.stream(_stream(torch.cuda.current_device())) if self._on_gpu else nullcontext()

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")


@lru_cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SoloTransport(OwnBuffers):
    """The group of one: nobody to talk to, no process group needed."""

    rank = 0
    world_size = 1

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        assert not sends and not receives
        return _Works((), (), ())

    def all_equal(self, payload: bytes) -> bool:
        return True

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class RecordingTransport(Transport):
    """Another transport, with a record of what went through: (peer, bytes, label) in the order of posting."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.sent: list[tuple[int, int, str]] = []
        self.received: list[tuple[int, int, str]] = []

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent += [(m.peer, m.bytes, m.label) for m in sends]
        self.received += [(m.peer, m.bytes, m.label) for m in receives]
        return self.inner.post(sends, receives)

    def all_equal(self, payload: bytes) -> bool:
        return self.inner.all_equal(payload)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self.inner.all_gather(payload)

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        self.inner.prepare(key, outgoing)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.empty(name, shape, dtype, device)


def _check(message: Message, rank: int, world_size: int) -> None:
    if not 0 <= message.peer < world_size or message.peer == rank:
        raise ValueError(f"peer must be another rank of the {world_size}, got {message.peer} on rank {rank}")
    if not message.tensor.is_contiguous() or not message.tensor.numel():
        raise ValueError(f"message {message.label!r} must be contiguous and not empty")
