"""Messages between GPUs of one host through symmetric memory: the receiver copies from the sender's memory.

The copies run on the copy engines, on a stream of their own, so that a kernel keeps all multiprocessors; NCCL's sends
and receives would take some of them. Sender and receiver synchronise by flags in each other's memory: the sender sets
"ready" at the receiver, which copies and sets "done" at the sender; each resets the flag that it waited for. All of
this happens on streams (`ring.comm.signals`), so the host never waits and a call can be captured in a CUDA graph.

Short messages that too little work hides are read by a kernel, which sets the flags and waits for them itself
(`ring.comm.pull_kernel`). In a put each rank writes into the memory of the others (`ring.comm.put_kernel`): the owner
of a free buffer sets "ready" at the writers, which write and set "done".

A receiver must know the addresses of its messages in the sender's memory, which follow from the sender's plan. So the
ranks exchange them once for each kind of call. Only then does the memory grow, on all ranks together.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep_alive
from ring.comm.copy_batch import Consumer, Copy, CopyBatch, Flags, Lane, Producer, PullBatch, PutBatch, can_pull
from ring.comm.process_group import ProcessGroupTransport, backends_of
from ring.comm.put_table import Entry, entries
from ring.comm.transport import EmptyBatch, Message, Outgoing, Pending, Put, SoloTransport, Transport, all_gather_json

_ALIGNMENT = 256  # bytes at which a buffer begins
_ROUTES = 1024  # cached per transport, one for each kind of call
_rendezvous = 0  # count of this process, over all groups
_Ranges = dict[str, dict[str, list[list[int]]]]  # label -> peer -> (start, stop) of its messages, in bytes


@dataclass(frozen=True, eq=False)
class _Route:
    """Addresses for one kind of call: where this rank's buffers begin, which bytes every rank sends, and the memory."""

    begins: dict[str, int]
    ranges: list[_Ranges]
    pool: _SharedMemory | None
    by_nccl: bool = False
    by_kernels: bool = True  # they may read messages
    copy_batches: dict[str, CopyBatch | PullBatch] = field(default_factory=dict)  # by label
    put_batches: dict[str, PutBatch] = field(default_factory=dict)  # by label

    def pulls(self, message: Message) -> bool:
        """Return True if a kernel reads the messages with this one's label: if it may, and the longest of any rank is
        short.
        """
        of_label = (
            span for of_rank in self.ranges for spans in of_rank.get(message.label, {}).values() for span in spans
        )
        return self.by_kernels and max(stop - start for start, stop in of_label) <= message.pulled


@dataclass(frozen=True, eq=False)
class _SharedMemory:
    """Memory of equal size on every rank. begins: addresses of all ranks' memory, valid on this rank."""

    own: torch.Tensor
    begins: list[int]
    flags: Flags
    handle: Any  # keeps the memory alive
    views: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)  # this rank's buffers


class SymmetricTransport(ProcessGroupTransport):
    """A transport for NCCL groups on one host whose GPUs can access each other's memory: see `unsupported_reason`.

    If no such memory can be allocated for a kind of call, every rank uses NCCL for it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._side = torch.cuda.Stream()
        self._current = torch.cuda.current_stream()  # of the call
        # All ranks see the same kinds of calls in the same order, so they evict the same routes.
        self._routes: BoundedCache[Hashable, _Route] = BoundedCache(_ROUTES)
        self._route: _Route | None = None
        self.by_nccl = False  # True once some kind of call uses NCCL
        self._can_pull = can_pull(self._side.device.index, self.world_size)
        self._pools: list[_SharedMemory] = []  # never freed: a captured graph may use any of them

    def prepare(self, key: Hashable, outgoing: Callable[[], list[Outgoing]]) -> None:
        """Look up the route of this kind of call. Only the first call of a kind is collective.

        A captured CUDA graph keeps its route alive, even after the cache evicts it. Raises RuntimeError if a route must
        be created while a graph is captured.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        self._route = None  # that of another kind of call
        route = self._route = self._routes.get_or_make(key, lambda: self._new_route(outgoing(), capturing))
        self.by_nccl |= route.by_nccl
        if capturing:
            keep_alive(route)
        self._current = torch.cuda.current_stream(self._side.device)  # naming the device saves a look-up

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a buffer, in symmetric memory if messages are sent from it."""
        route = self._route
        assert route is not None
        if name not in route.begins or route.pool is None:
            return super().empty(name, shape, dtype, device)
        key = route.begins[name], dtype, *shape
        buffer = route.pool.views.get(key)
        if buffer is None:
            begin, size = route.begins[name], dtype.itemsize * torch.Size(shape).numel()
            buffer = route.pool.views[key] = route.pool.own[begin : begin + size].view(dtype).view(*shape)
        return buffer

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        route = self._route
        assert route is not None
        if route.by_nccl:
            return super().post(sends, receives)
        if route.pool is None or not (sends or receives):
            return EmptyBatch()
        return self._copy_batch(route, route.pool, sends, receives).run(receives, self._current)

    @property
    def one_sided(self) -> bool:
        """True unless the call that is prepared uses NCCL."""
        return self._route is None or not self._route.by_nccl

    def put(self, puts: Sequence[Put], receives: Sequence[Message]) -> Pending:
        route = self._route
        assert route is not None and not route.by_nccl
        if not (puts or receives):
            return EmptyBatch()
        label = puts[0].label if puts else receives[0].label
        batch = route.put_batches.get(label)
        if batch is None:
            batch = route.put_batches[label] = self._put_batch(route, puts, receives)
        return batch.run(puts, self._current)

    def _put_batch(self, route: _Route, puts: Sequence[Put], receives: Sequence[Message]) -> PutBatch:
        """Return the batch for these puts, whose targets recur in every call of this kind."""
        from ring.comm.put_kernel import Putter  # not at the top: torch for CPUs has no Triton

        pool = route.pool
        peers = {target.peer for put in puts for target in put.targets} - {self.rank}
        flags = Flags(self.rank, []) if pool is None else pool.flags  # without memory there are no peers
        putters = []
        for put in puts:
            shared = put.own if pool is None else pool.own[: pool.own.numel() // _ALIGNMENT * _ALIGNMENT]
            putters.append(Putter(self.put_entries(route, put), shared.view(put.own.dtype)))
        return PutBatch(
            [Consumer(peer, flags) for peer in self._nearest_first(receives)],
            [Producer(peer, flags, ()) for peer in sorted(peers, key=self._distance)],
            putters,
            self._side,
        )

    def put_entries(self, route: _Route, put: Put) -> list[Entry]:
        """List the targets of a put, by their addresses in the memory of all ranks."""
        size = put.own.itemsize

        def begin(peer: int) -> int:
            assert route.pool is not None
            begins = route.pool.begins
            ((start, stop),) = route.ranges[peer][put.label][str(self.rank)]
            if stop - start != put.bytes_to(peer):
                raise RuntimeError(
                    f"message {put.label!r} to rank {peer} has {put.bytes_to(peer)} bytes, its buffer {stop - start}"
                )
            return (begins[peer] + start - begins[self.rank]) // size

        return entries(put.targets, self.rank, begin, put.slot_bytes // size)

    def _copy_batch(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> CopyBatch | PullBatch:
        """Return the batch for these messages, which share a label and recur in every call of this kind."""
        first = (*receives, *sends)[0]
        batch = route.copy_batches.get(first.label)
        if batch is None:
            make = self._pull_batch if route.pulls(first) else self._engine_batch
            batch = route.copy_batches[first.label] = make(route, pool, sends, receives)
        return batch

    def _engine_batch(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> CopyBatch:
        """Return the batch of messages that copy engines copy."""
        consumers = [Consumer(peer, pool.flags) for peer in self._nearest_first(sends)]
        producers = [self._producer(route, pool, peer, receives) for peer in self._nearest_first(receives)]
        return CopyBatch(consumers, producers, self._side)

    def _pull_batch(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> PullBatch:
        """Return the batch of messages that a kernel reads."""
        from ring.comm.pull_kernel import Puller, Waiter  # not at the top: torch for CPUs has no Triton

        lanes, done = self.pull_lanes(route, pool, sends, receives)
        return PullBatch(Puller(lanes, pool.own), Waiter(done, pool.own.device), self._side)

    def pull_lanes(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[Lane], list[int]]:
        """Return the ranks that read here and are read, and the counts in which the former say that they have read."""
        flags, rank, lanes = pool.flags, self.rank, []
        readers, read = self._nearest_first(sends), self._nearest_first(receives)
        for reader, peer in zip_longest(readers, read):
            there = 0 if reader is None else flags.share(reader, rank)
            if peer is None:
                lanes.append(Lane(there))
                continue
            copies = [
                (copy.source - pool.begins[rank], receives[copy.place].offset, copy.size)
                for copy in self._producer(route, pool, peer, receives).copies
            ]
            lanes.append(Lane(there, flags.share(rank, peer), flags.done(peer, rank), copies))
        return lanes, [flags.done(rank, peer) for peer in readers]

    def _nearest_first(self, messages: Sequence[Message]) -> list[int]:
        """Peers of the messages, the next rank first: so ranks copy from different ranks at a time."""
        return sorted({message.peer for message in messages}, key=self._distance)

    def _distance(self, peer: int) -> int:
        return (peer - self.rank) % self.world_size

    def _producer(self, route: _Route, pool: _SharedMemory, peer: int, receives: Sequence[Message]) -> Producer:
        copies = []
        counts: dict[str, int] = {}  # messages so far, by label
        for place, message in enumerate(receives):
            if message.peer == peer:
                number = counts.get(message.label, 0)
                counts[message.label] = number + 1
                start, stop = route.ranges[peer][message.label][str(self.rank)][number]
                if stop - start != message.bytes:
                    raise RuntimeError(
                        f"message {message.label!r} from rank {peer} has {stop - start} bytes, its buffer "
                        f"{message.bytes}"
                    )
                copies.append(Copy(place, pool.begins[peer] + start, message.bytes))
        return Producer(peer, pool.flags, tuple(copies))

    def _new_route(self, outgoing: list[Outgoing], capturing: bool) -> _Route:
        if capturing:  # ranks that do not capture would wait for a collective that a graph does not run
            raise RuntimeError(
                "a call that a CUDA graph captures must have run before with the same setting, dtype, batch and head "
                f"dims, and fewer than {_ROUTES} other kinds of calls since: its ranks must know each other's buffers"
            )
        sizes: dict[str, int] = {}
        for message in outgoing:
            sizes[message.buffer] = max(sizes.get(message.buffer, 0), message.size)
        begins, end = {}, 0
        for name, size in sizes.items():
            begins[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        ranges: _Ranges = {}
        for message in outgoing:
            begin = begins[message.buffer]
            to_peer = ranges.setdefault(message.label, {}).setdefault(str(message.peer), [])
            to_peer.append([begin + message.start, begin + message.stop])
        gathered: list[Any] = all_gather_json([end, ranges, _rendezvous, self._can_pull], self)
        size = max(size for size, *_ in gathered)
        grows = size > 0 and (not self._pools or self._pools[-1].own.numel() < size)
        # torch counts the rendezvous of a process over all groups, and hangs if ranks differ in their counts. They
        # differ where groups overlap and one rank is in more groups than another.
        if grows and len({count for _, _, count, _ in gathered}) > 1:
            return _Route({}, [], None, by_nccl=True)
        by_kernels = all(can for *_, can in gathered)
        return _Route(begins, [theirs for _, theirs, *_ in gathered], self._pool(size), by_kernels=by_kernels)

    def _pool(self, size: int) -> _SharedMemory | None:
        """Return memory of at least `size` bytes, the same on all ranks. Collective."""
        if size == 0:
            return None
        if not self._pools or self._pools[-1].own.numel() < size:
            import torch.distributed._symmetric_memory as symmetric

            global _rendezvous  # noqa: PLW0603 - one count for all transports of the process
            _rendezvous += 1
            front = -(-Flags.nbytes(self.world_size) // _ALIGNMENT) * _ALIGNMENT
            device = torch.device("cuda", torch.cuda.current_device())
            whole = symmetric.empty(front + size, dtype=torch.uint8, device=device)
            whole[:front].zero_()
            torch.cuda.synchronize()  # zero the flags before any other rank sees them
            assert self.group is not None
            handle = symmetric.rendezvous(whole, group=self.group)
            buffers = [handle.get_buffer(rank, (front + size,), torch.uint8) for rank in range(self.world_size)]
            begins = [buffer.data_ptr() for buffer in buffers]
            flags = Flags(self.rank, begins)
            self._pools.append(_SharedMemory(whole[front:], [begin + front for begin in begins], flags, handle))
        return self._pools[-1]


def can_be_captured(transport: Transport) -> bool:
    """Return True if calls over this transport can be captured automatically: none uses NCCL or CPU messages."""
    if isinstance(transport, SymmetricTransport):
        return not transport.by_nccl
    return isinstance(transport, SoloTransport)


_transports: dict[dist.ProcessGroup, ProcessGroupTransport] = {}


def transport_of(group: dist.ProcessGroup | None) -> ProcessGroupTransport:
    """Return the transport for tensors on the current GPU: symmetric memory if possible, else the process group. The
    same class on every rank. The first call with a group is collective.
    """
    key: dist.ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
    if key in _transports:
        return _transports[key]
    if dist.get_rank(key) < 0 or backends_of(key).get("cuda") != "nccl":
        return ProcessGroupTransport(key)
    plain = ProcessGroupTransport(key)
    _transports[key] = plain if unsupported_reason(plain) else SymmetricTransport(key)
    return _transports[key]


def unsupported_reason(transport: ProcessGroupTransport) -> str:
    """Return why ranks with a GPU each cannot share memory, or "" if they can; the same on every rank. Collective."""
    device = torch.cuda.current_device()
    mine = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), torch.cuda.device_count()]
    gathered = all_gather_json(mine, transport)
    hosts, devices = {host for host, _, _ in gathered}, {uuid for _, uuid, _ in gathered}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(devices) < len(gathered):
        return "two ranks share a GPU"
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    no_access = [
        u for u in devices if u in seen and seen[u] != device and not torch.cuda.can_device_access_peer(device, seen[u])
    ]
    hidden = [u for u in devices if u not in seen]
    counts = all_gather_json([len(no_access), len(hidden)], transport)
    for rank, (inaccessible, invisible) in enumerate(counts):
        if inaccessible:
            return f"rank {rank} has no access to the memory of {inaccessible} other GPUs"
        if invisible:
            return f"rank {rank} does not see {invisible} of the other ranks' GPUs"
    return ""
