"""Messages between GPUs of one host through symmetric memory: the receiver copies from the sender's memory.

The copies run on the copy engines, on streams of their own, so that a kernel keeps all multiprocessors; NCCL's sends
and receives would take some of them. Sender and receiver synchronise by flags in each other's memory: the sender sets
"ready" at the receiver, who copies and sets "done" at the sender; each resets the flag that it waited for. All of this
happens on streams (`ring.comm.signals`), so the host waits for nothing and a call can be captured in a CUDA graph.

A receiver must know where in the sender's memory its messages lie, which follows from the sender's plan. So the ranks
tell each other once for every kind of call; only then does the memory grow, on all ranks together.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep
from ring.comm import signals
from ring.comm.copy_batch import Consumer, Copy, CopyBatch, Flags, Producer, Streams
from ring.comm.process_group import ProcessGroupTransport, backends_of
from ring.comm.transport import Message, Nothing, Outgoing, Pending, SoloTransport, Transport, all_gather_json

_ALIGNMENT = 256  # bytes at which a buffer begins
_ROUTES = 1024  # kinds of calls whose routes a transport keeps
_rendezvous = 0  # of this process, in all groups
_Ranges = dict[str, dict[str, list[list[int]]]]  # label -> peer -> (start, stop) of its messages, in bytes


@dataclass(frozen=True, eq=False)
class _Route:
    """One kind of call: where this rank's buffers begin, what every rank sends from where, and the memory."""

    begins: dict[str, int]
    ranges: list[_Ranges]
    pool: _SharedMemory | None
    by_nccl: bool = False
    meetings: dict[str, CopyBatch] = field(default_factory=dict)  # by the label of their messages


@dataclass(frozen=True, eq=False)
class _SharedMemory:
    """Memory of equal size on every rank. begins: addresses of everyone's, seen from here; flags: of their flags."""

    own: torch.Tensor
    begins: list[int]
    flags: Flags
    handle: Any  # as long as it is there, the memory is
    views: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)  # of own buffers


class SymmetricTransport(ProcessGroupTransport):
    """For a group with NCCL whose ranks are GPUs of one host with access to each other's memory: see `why_not`.

    A kind of call for which no such memory can be allocated goes by NCCL, on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._streams = Streams.of(self.world_size)
        self._current = torch.cuda.current_stream()  # of the call
        # All ranks come to the same kinds of calls in the same order, so they forget the same ones.
        self._routes: BoundedCache[Hashable, _Route] = BoundedCache(_ROUTES)
        self._route: _Route | None = None
        self.by_nccl = False  # some kind of call
        self._pools: list[_SharedMemory] = []  # all that there ever were: a captured graph may use any

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """The first call of a kind is collective, and no other; so the key must be the same on all ranks.

        What a CUDA graph captures goes on using its route, which is kept with it, whether forgotten here or not. Raises
        RuntimeError for a route that would be made, or made again, while a graph is captured.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        route = self._route = self._routes.get_or_make(key, lambda: self._new_route(outgoing(), capturing))
        self.by_nccl |= route.by_nccl
        if capturing:
            keep(route)
        self._current = torch.cuda.current_stream(self._streams.side.device)  # without a device torch asks for it

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer: in the common memory if messages are sent from it."""
        route = self._route
        assert route is not None
        if name not in route.begins or route.pool is None:
            return super().empty(name, shape, dtype, device)
        key = route.begins[name], dtype, *shape
        found = route.pool.views.get(key)
        if found is None:
            begin, size = route.begins[name], dtype.itemsize * torch.Size(shape).numel()
            found = route.pool.views[key] = route.pool.own[begin : begin + size].view(dtype).view(*shape)
        return found

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        route = self._route
        assert route is not None
        if route.by_nccl:
            return super().post(sends, receives)
        if route.pool is None or not (sends or receives):
            return Nothing()
        return self._meeting(route, route.pool, sends, receives).run(receives, self._current)

    def _meeting(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> CopyBatch:
        """For the messages of that label, which are the same in every call of a kind."""
        label = (*receives, *sends)[0].label
        found = route.meetings.get(label)
        if found is None:
            readers = [Consumer(peer, pool.flags) for peer in self._nearest_first(sends)]
            owners = [self._owner(route, pool, peer, receives) for peer in self._nearest_first(receives)]
            found = route.meetings[label] = CopyBatch(readers, owners, self._streams)
        return found

    def _nearest_first(self, messages: Sequence[Message]) -> list[int]:
        """Their peers, so that not all ranks copy from one rank at a time."""
        return sorted({message.peer for message in messages}, key=lambda peer: (peer - self.rank) % self.world_size)

    def _owner(self, route: _Route, pool: _SharedMemory, peer: int, receives: Sequence[Message]) -> Producer:
        copies = []
        taken: dict[str, int] = {}
        for place, message in enumerate(receives):
            if message.peer == peer:
                number = taken.get(message.label, 0)
                taken[message.label] = number + 1
                start, stop = route.ranges[peer][message.label][str(self.rank)][number]
                if stop - start != message.bytes:
                    raise RuntimeError(
                        f"message {message.label!r} from rank {peer} has {stop - start} bytes, its buffer "
                        f"{message.bytes}"
                    )
                copies.append(Copy(place, pool.begins[peer] + start, message.bytes))
        return Producer(peer, pool.flags, tuple(copies))

    def _new_route(self, outgoing: list[Outgoing], capturing: bool) -> _Route:
        if capturing:  # the other ranks, where nothing may be captured, would wait for what a graph does not run
            raise RuntimeError(
                "a call that a CUDA graph captures must have run before with the same setting, dtype, batch and head "
                f"dim, and fewer than {_ROUTES} other kinds of calls since: its ranks must know each other's buffers"
            )
        sizes: dict[str, int] = {}
        for part in outgoing:
            sizes[part.buffer] = max(sizes.get(part.buffer, 0), part.size)
        begins, at = {}, 0
        for name, size in sizes.items():
            begins[name] = at
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        ranges: _Ranges = {}
        for part in outgoing:
            begin = begins[part.buffer]
            places = ranges.setdefault(part.label, {}).setdefault(str(part.peer), [])
            places.append([begin + part.start, begin + part.stop])
        everyone: list[Any] = all_gather_json([at, ranges, _rendezvous], self)
        size = max(size for size, _, _ in everyone)
        grows = size > 0 and (not self._pools or self._pools[-1].own.numel() < size)
        # torch counts the rendezvous of a process over all groups, and ranks whose counts differ never meet. That
        # happens to ranks of overlapping groups, where one is in more groups than the other.
        if grows and len({number for _, _, number in everyone}) > 1:
            return _Route({}, [], None, by_nccl=True)
        return _Route(begins, [theirs for _, theirs, _ in everyone], self._pool(size))

    def _pool(self, size: int) -> _SharedMemory | None:
        """Memory of at least so many bytes. Collective: all ranks ask for the same size."""
        if size == 0:
            return None
        if not self._pools or self._pools[-1].own.numel() < size:
            import torch.distributed._symmetric_memory as symmetric

            global _rendezvous  # noqa: PLW0603 - counted for all transports of the process
            _rendezvous += 1
            front = -(-2 * self.world_size * signals.BYTES // _ALIGNMENT) * _ALIGNMENT
            device = torch.device("cuda", torch.cuda.current_device())
            whole = symmetric.empty(front + size, dtype=torch.uint8, device=device)
            whole[:front].zero_()
            torch.cuda.synchronize()  # before any other rank knows of it
            assert self.group is not None
            handle = symmetric.rendezvous(whole, group=self.group)
            everyone = [handle.get_buffer(rank, (front + size,), torch.uint8) for rank in range(self.world_size)]
            begins = [theirs.data_ptr() for theirs in everyone]
            flags = Flags(self.rank, begins)
            self._pools.append(_SharedMemory(whole[front:], [begin + front for begin in begins], flags, handle))
        return self._pools[-1]


def can_be_captured(transport: Transport) -> bool:
    """Whether a call over it may be captured without its user's knowledge: no message is NCCL's, and none CPUs'."""
    if isinstance(transport, SymmetricTransport):
        return not transport.by_nccl
    return isinstance(transport, SoloTransport)


_transports: dict[dist.ProcessGroup, ProcessGroupTransport] = {}


def transport_of(group: dist.ProcessGroup | None) -> ProcessGroupTransport:
    """The transport for tensors on the current GPU: symmetric memory where that is possible, else the process group.
    The same kind on every rank; the first call with a group is collective.
    """
    found: dist.ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
    if found in _transports:
        return _transports[found]
    if dist.get_rank(found) < 0 or backends_of(found).get("cuda") != "nccl":
        return ProcessGroupTransport(found)
    plain = ProcessGroupTransport(found)
    _transports[found] = plain if why_not(plain) else SymmetricTransport(found)
    return _transports[found]


def why_not(transport: ProcessGroupTransport) -> str:
    """Why ranks with a GPU each cannot share memory, "" if they can. Collective: every rank gets the same answer."""
    device = torch.cuda.current_device()
    mine = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), torch.cuda.device_count()]
    everyone = all_gather_json(mine, transport)
    hosts, devices = {host for host, _, _ in everyone}, {uuid for _, uuid, _ in everyone}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(devices) < len(everyone):
        return "two ranks share a GPU"
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    apart = [
        u for u in devices if u in seen and seen[u] != device and not torch.cuda.can_device_access_peer(device, seen[u])
    ]
    hidden = [u for u in devices if u not in seen]
    said = all_gather_json([len(apart), len(hidden)], transport)
    for rank, (number, unseen) in enumerate(said):
        if number:
            return f"rank {rank} has no access to the memory of {number} other GPUs"
        if unseen:
            return f"rank {rank} does not see {unseen} of the other ranks' GPUs"
    return ""
