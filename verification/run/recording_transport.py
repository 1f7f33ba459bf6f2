"""A transport that records the messages of another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ring.comm.transport import Message, Outgoing, Pending, Put, Transport, one_sided


class RecordingTransport(Transport):
    """Wraps a transport and records its messages, (peer, bytes, label), in the order of posting."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.world_size, self.calls = inner, inner.rank, inner.world_size, inner.calls
        self.sent: list[tuple[int, int, str]] = []
        self.received: list[tuple[int, int, str]] = []

    @property
    def hosts(self) -> tuple[int, ...]:
        return self.inner.hosts

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent += [(m.peer, m.bytes, m.label) for m in sends]
        self.received += [(m.peer, m.bytes, m.label) for m in receives]
        return self.inner.post(sends, receives)

    @property
    def one_sided(self) -> bool:
        return one_sided(self.inner)

    def put(self, puts: Sequence[Put], receives: Sequence[Message]) -> Pending:
        self.sent += [
            (peer, put.bytes_to(peer), put.label)
            for put in puts
            for peer in sorted({target.peer for target in put.targets} - {self.rank})
        ]
        self.received += [(m.peer, m.bytes, m.label) for m in receives]
        assert one_sided(self.inner)
        return self.inner.put(puts, receives)

    def all_equal(self, payload: bytes) -> bool:
        return self.inner.all_equal(payload)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self.inner.all_gather(payload)

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        self.inner.prepare(key, outgoing)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.empty(name, shape, dtype, device)
