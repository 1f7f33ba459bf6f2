"""The interface of a transport, which moves tensors between the ranks of a group in batches of sends and receives.
`ring.comm.process_group` implements it over torch's process groups.

A transport knows nothing of attention. Its contract, every freedom of which the simulated transport uses:
- a send reads its tensor at any time between `post` and the end of `wait`: do not change it before;
- a receive writes its tensor at any time between `post` and the end of `wait`: neither read nor write it before;
- messages from one rank to another match in the order in which they were posted, and have the receive's exact size;
- nothing is sent to oneself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch

from ring.comm.call_order import Calls


class MissingRanks(RuntimeError):
    """Ranks did not come in time to a collective. ranks: their numbers; empty: all came, too late; None: unknown."""

    def __init__(self, ranks: Sequence[int] | None, waited: str) -> None:
        self.ranks, self.waited = ranks if ranks is None else tuple(ranks), waited
        super().__init__(self.message("where the others wait"))

    @property
    def note(self) -> bytes:
        """The error as a note for the other ranks."""
        return f"{','.join(map(str, self.ranks or ()))} {self.waited}".encode("ascii", "backslashreplace")

    @classmethod
    def from_note(cls, note: bytes, reader: int) -> MissingRanks:
        """Return the error of a note, as rank `reader` raises it. A rank that it names learns only that it is late."""
        ranks, _, waited = note.decode().partition(" ")
        missing = [int(rank) for rank in ranks.split(",") if rank]
        return cls((), "another rank has given up") if reader in missing else cls(missing, waited)

    def message(self, where: str) -> str:
        """Text of the error. where: the operation that they missed."""
        if self.ranks is None:
            who = "some rank did not come"
        elif not self.ranks:
            who = "not all ranks came in time"
        else:
            who = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {', '.join(map(str, self.ranks))} did not come"
        return f"{who} to {where}: {self.waited}"


@dataclass(frozen=True, eq=False)
class Message:
    """A contiguous tensor to send to, or to receive from, a peer (a rank in the group). `label` names its contents.

    With `stop` it is the entries start .. stop - 1 of a contiguous buffer. It is created lazily: GPUs need an address.
    pulled: most bytes at which a kernel of the receiver reads it, if it can read the sender's memory. The kernel is
    sooner done than a copy engine, but takes multiprocessors. All receives of such a batch have one buffer.
    """

    peer: int
    buffer: torch.Tensor
    label: str
    start: int = 0
    stop: int | None = None
    pulled: int = 0

    @cached_property
    def tensor(self) -> torch.Tensor:
        return self.buffer if self.stop is None else self.buffer[self.start : self.stop]

    @property
    def bytes(self) -> int:
        return self.buffer.nbytes if self.stop is None else (self.stop - self.start) * self._entry

    def announced(self, buffer: str) -> Outgoing:
        """Announce it. buffer: name of its buffer."""
        return Outgoing(buffer, self.buffer.nbytes, self.label, self.peer, self.offset, self.offset + self.bytes)

    @property
    def address(self) -> int:
        return self.buffer.data_ptr() + self.offset

    @property
    def offset(self) -> int:
        """Bytes from the buffer's start."""
        return self.start * self._entry

    @property
    def _entry(self) -> int:
        """Bytes per entry of the buffer."""
        return self.buffer.stride(0) * self.buffer.itemsize


@dataclass(frozen=True)
class Outgoing:
    """A message that a call will send: bytes start .. stop - 1 of one of its buffers, which has `size` bytes."""

    buffer: str
    size: int
    label: str
    peer: int
    start: int
    stop: int


class Target(NamedTuple):
    """Rows and heads of a tensor, for one rank. first: their first slot in that rank's buffer; row_slots: slots from
    one of these rows to the next.
    """

    peer: int
    rows: range
    heads: range
    first: int
    row_slots: int


@dataclass(frozen=True, eq=False)
class Put:
    """Rows and heads of a tensor, (B, rows, heads, D), to write into the buffers in which other ranks receive this
    label. Those for the rank itself go to `own`, its buffer. A slot is one row of one head, (B, D).
    """

    label: str
    tensor: torch.Tensor
    targets: tuple[Target, ...]
    own: torch.Tensor

    @property
    def slot_bytes(self) -> int:
        return self.tensor.shape[0] * self.tensor.shape[3] * self.own.itemsize

    def bytes_to(self, peer: int) -> int:
        return self.slot_bytes * sum(len(x.rows) * len(x.heads) for x in self.targets if x.peer == peer)


M = TypeVar("M", Message, Outgoing)


class Pending(Protocol):
    """A posted batch."""

    def arrive(self) -> None:
        """Return when every receive has arrived. The buffers of the sends may still be read."""

    def wait(self) -> None:
        """Return when every receive has arrived and every send has been read."""


class Consensus(Protocol):
    """The part of a transport that consensus needs. calls: of this rank on the group."""

    rank: int
    world_size: int
    calls: Calls

    def all_equal(self, payload: bytes) -> bool:
        """Return True if all ranks passed the same bytes. Collective.

        Args:
            payload: of one length on all ranks, divisible by 8.

        Raises:
            MissingRanks: another rank does not come within the group's timeout.
        """
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks in rank order. Collective.

        Args:
            payload: of one length on all ranks.
        """
        ...


@runtime_checkable
class Transport(Consensus, Protocol):
    """The ranks of one group, seen from one of them: `rank` of `world_size`. `calls` numbers this rank's calls."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host of each rank, by first appearance, the same on every rank. Collective on first use."""
        raise NotImplementedError

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Return the posted batch of messages, to wait for; it may be empty.

        Args:
            sends, receives: messages to, and from, other ranks.
        """
        ...

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Prepare for a call, before its buffers are allocated.

        Args:
            key: the kind of call, the same on every rank.
            outgoing: lists the messages of such a call.
        """
        ...

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer, valid until the call ends.

        Args:
            name, shape, dtype, device: of the buffer; `Outgoing.buffer` is its name.
        """
        ...


class OneSidedTransport(Transport, Protocol):
    """A transport whose ranks may write into each other's memory, in place of messages. See `one_sided`.

    For a call that puts, `prepare` is given what a rank receives, and with which label.
    """

    @property
    def one_sided(self) -> bool:
        """True if the call that is prepared can put. The same on every rank."""
        ...

    def put(self, puts: Sequence[Put], receives: Sequence[Message]) -> Pending:
        """Write rows of tensors into buffers of the receivers.

        Args:
            puts: rows for other ranks, and for this one.
            receives: what other ranks write into buffers of this one.

        Returns:
            The batch. Tensors and buffers are as in `post`.
        """
        ...


def one_sided(transport: Transport) -> TypeGuard[OneSidedTransport]:
    """Return True if the call that a transport has prepared, or is to prepare, can put."""
    return bool(getattr(transport, "one_sided", False))


class LocalBuffers(Transport):
    """A transport that sends from ordinary tensors, between ranks of one host unless a subclass knows better."""

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        return (0,) * self.world_size

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Do nothing."""

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)


def all_gather_json(value: object, ranks: Consensus) -> list[Any]:
    """Return the values of all ranks in rank order. Collective; values must be JSON-serialisable."""
    text = json.dumps(value).encode()
    lengths = [int.from_bytes(length, "little") for length in ranks.all_gather(len(text).to_bytes(8, "little"))]
    padded = ranks.all_gather(text.ljust(max(lengths)))
    return [json.loads(texts[:length]) for texts, length in zip(padded, lengths, strict=True)]


class EmptyBatch:
    """A batch without messages."""

    def arrive(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""


class SoloTransport(LocalBuffers):
    """A group of one rank, which needs no process group."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.calls = Calls()

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        assert not sends and not receives
        return EmptyBatch()

    def all_equal(self, payload: bytes) -> bool:
        return True

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class SomeRanks(Transport):
    """Some ranks of a group, seen from one of them, in a part of a call that the group's transport has prepared. Their
    messages go through that transport; they agree on nothing by themselves.

    part: the end of names of buffers and labels, which recur in other parts.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int], part: str) -> None:
        self.whole, self._ranks, self._part = whole, ranks, part
        self.rank, self.world_size, self.calls = ranks.index(whole.rank), len(ranks), whole.calls

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Do nothing: some ranks may have no messages in this part."""

    def to_whole(self, outgoing: Sequence[Outgoing]) -> list[Outgoing]:
        """Translate announced messages to those of the group's transport."""
        return [replace(message, buffer=message.buffer + self._part) for message in self._translated(outgoing)]

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.whole.empty(name + self._part, shape, dtype, device)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self.whole.post(self._translated(sends), self._translated(receives))

    def _translated(self, messages: Sequence[M]) -> list[M]:
        return [replace(m, peer=self._ranks[m.peer], label=m.label + self._part) for m in messages]

    @property
    def hosts(self) -> tuple[int, ...]:
        raise NotImplementedError

    def all_equal(self, payload: bytes) -> bool:
        raise NotImplementedError

    def all_gather(self, payload: bytes) -> list[bytes]:
        raise NotImplementedError
