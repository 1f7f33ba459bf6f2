"""Symmetric memory on a machine without GPUs: addresses of messages, and what captured CUDA graphs keep alive."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ring.comm.exchange
from reference.pattern import Pattern
from ring import Layout
from ring.caching import graph_keepalive
from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep_alive_for_one_graph
from ring.comm import signals, symmetric_memory
from ring.comm.copy_batch import SHARES, Flags
from ring.comm.put_table import Entry
from ring.comm.symmetric_memory import SymmetricTransport, _Route, _SharedMemory
from ring.comm.transport import Message, Outgoing, Pending, Put, all_gather_json
from tests.ring.test_all_to_all import CASES, check, layout_of, patterns
from tests.support.attention_cases import plain as plain_call
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.checks import check_buffers, check_traffic
from verification.check.properties import prepare
from verification.problems import links
from verification.run.observation import Observation
from verification.run.rank import observe
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

KINDS = 3  # of calls of which a transport here knows the routes


class OnNoGPU(SymmetricTransport):
    """A transport whose ranks have exchanged the addresses of their buffers."""

    def __init__(self) -> None:
        self._routes = BoundedCache(KINDS)
        self._side = SimpleNamespace(device=None)  # type: ignore[assignment]
        self.by_nccl, self._can_pull = False, True
        self._pools, self.made, self.capturing = [], 0, False

    def _pool(self, size: int) -> None:
        self.made += 1


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> OnNoGPU:
    found = OnNoGPU()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(graph_keepalive, "_forever", [])
    monkeypatch.setattr(symmetric_memory, "all_gather_json", lambda mine, ranks: [mine])
    return found


def prepared(transport: SymmetricTransport, kind: int) -> weakref.ref[_Route]:
    transport.prepare(kind, list)
    assert transport._route is not None
    return weakref.ref(transport._route)


def forget(transport: SymmetricTransport) -> None:
    """Prepare for so many other kinds of calls that earlier ones are dropped."""
    for kind in range(100, 100 + KINDS):
        prepared(transport, kind)
    gc.collect()


def test_routes_are_made_once_and_evicted_oldest_first(transport: OnNoGPU) -> None:
    route = prepared(transport, 0)
    assert prepared(transport, 0)() is route() is not None and transport.made == 1
    forget(transport)
    assert route() is None


def test_routes_live_as_long_as_their_graph(transport: OnNoGPU) -> None:
    prepared(transport, 0)
    with keep_alive_for_one_graph() as reads:
        transport.capturing = True
        route = prepared(transport, 0)
        transport.capturing = False
    forget(transport)
    assert 0 not in transport._routes and reads == [route()] and graph_keepalive._forever == []
    reads.clear()
    gc.collect()
    assert route() is None


def test_routes_in_user_graphs_are_never_freed(transport: OnNoGPU) -> None:
    before = prepared(transport, 0)  # a call of the kind, not captured
    transport.capturing = True
    assert prepared(transport, 0)() is before()
    transport.capturing = False
    forget(transport)
    assert 0 not in transport._routes and before() is not None


def test_no_route_is_made_while_a_graph_is_captured(transport: OnNoGPU) -> None:
    """Also none that was forgotten: to make one, ranks talk to each other, which a capture would only record."""
    prepared(transport, 0)
    forget(transport)
    transport.capturing = True
    made = transport.made
    with pytest.raises(RuntimeError, match="must have run before .* and fewer than 1024 other kinds of calls since"):
        prepared(transport, 0)
    assert transport.made == made and 0 not in transport._routes


class InOneProcess(SymmetricTransport):
    """Symmetric memory of a simulated rank. The simulation carries the messages; `sent` has their addresses, and
    `copied` those from which the receivers would copy, and `set_flags` less `awaited` nothing. Puts write to the memory
    of other ranks.
    """

    sent: Counter[tuple[int, ...]]
    copied: Counter[tuple[int, ...]]
    written: Counter[int]  # targets, by rank
    set_flags: Counter[int]  # addresses
    awaited: Counter[int]
    pulled: Counter[str]  # messages, by label
    weak_rank: int | None = None  # a rank whose kernels cannot read

    def __init__(self, inner: SimulatedTransport) -> None:
        self._inner, self._routes, self._pools, self.by_nccl = inner, BoundedCache(64), [], False
        self._can_pull = inner.rank != InOneProcess.weak_rank
        self.rank, self.world_size, self.calls = inner.rank, inner.world_size, inner.calls
        self._batches: dict[object, Sequence[tuple[int, ...]]] = {}
        self.all_equal, self.all_gather = inner.all_equal, inner.all_gather  # type: ignore[method-assign]
        self._side = SimpleNamespace(device=None)  # type: ignore[assignment]

    def _pool(self, size: int) -> _SharedMemory | None:
        if size and (not self._pools or self._pools[-1].own.numel() < size):
            own = torch.empty(size, dtype=torch.uint8)
            begins = all_gather_json(own.data_ptr(), self)
            self._pools.append(_SharedMemory(own, begins, Flags(self.rank, begins), None))
        return self._pools[-1] if size else None

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        route, copies = self._route, []
        assert route is not None
        if route.pool is not None and (sends or receives):
            peers = self._nearest_first(receives)
            found = [(peer, self._producer(route, route.pool, peer, receives).copies) for peer in peers]
            copies = [(self.rank, peer, copy.source, copy.size) for peer, some in found for copy in some]
            first = (*receives, *sends)[0]
            self._copy_batch(route, route.pool, sends, receives)
            # Its label finds a batch again.
            assert self._batches.setdefault((route, first.label), copies) == copies
        self.sent.update((m.peer, self.rank, m.address, m.bytes) for m in sends)
        self.copied.update(copies)
        return self._inner.post(sends, receives)

    def _pull_batch(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Any:
        """Check where a kernel would read and write, and count its flags."""
        assert len({id(message.buffer) for message in receives}) <= 1
        lanes, done = self.pull_lanes(route, pool, sends, receives)
        found = {(pool.own.data_ptr() + source, size) for lane in lanes for source, _, size in lane.copies}
        read = {message.peer for message in receives}
        assert found == {(x.source, x.size) for p in read for x in self._producer(route, pool, p, receives).copies}
        places = sorted((to, size) for lane in lanes for _, to, size in lane.copies)
        assert places == sorted((message.address - message.buffer.data_ptr(), message.bytes) for message in receives)
        assert {lane.ready_here for lane in lanes} <= {0, *(pool.flags.share(self.rank, peer) for peer in read)}
        self._count(x for lane in lanes for x in (lane.ready_there, lane.done_there))
        self.awaited.update([*(lane.ready_here for lane in lanes if lane.ready_here), *done])
        self.pulled.update([(*receives, *sends)[0].label])

    def _engine_batch(
        self, route: _Route, pool: _SharedMemory, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Any:
        """Count the flags that copies would set and await."""
        flags, readers, read = pool.flags, {m.peer for m in sends}, {m.peer for m in receives}
        self._count([*(flags.ready(x, self.rank) for x in readers), *(flags.done(x, self.rank) for x in read)])
        self.awaited.update([*(flags.ready(self.rank, x) for x in read), *(flags.done(self.rank, x) for x in readers)])

    def _count(self, flags: Iterable[int]) -> None:
        self.set_flags.update(flag for flag in flags if flag)

    def put(self, puts: Sequence[Put], receives: Sequence[Message]) -> Pending:
        """Write by the table of the kernel, once the receivers are ready, and tell them."""
        route = self._route
        assert route is not None
        peers = {target.peer for put in puts for target in put.targets} - {self.rank}
        writers = {m.peer for m in receives}
        self._inner.post(_flags(writers, "ready"), _flags(peers, "ready")).wait()
        for put in puts:
            begin = put.own if route.pool is None else route.pool.own
            for entry in self.put_entries(route, put):
                _write(entry, put, put.own if entry.own else begin)
                InOneProcess.written[self.rank] += 1
        return self._inner.post(_flags(peers, "done"), _flags(writers, "done"))


def _flags(peers: set[int], label: str) -> list[Message]:
    return [Message(peer, torch.zeros(1), label) for peer in sorted(peers)]


def _write(entry: Entry, put: Put, begin: torch.Tensor) -> None:
    """Write a part by its addresses, as the kernel does."""
    batch, _, _, dim = put.tensor.shape
    rows = entry.row, entry.row + entry.rows * entry.row_step, entry.row_step
    heads = (entry.head, entry.head + entry.columns // (batch * dim))
    part = (
        put.tensor[:, slice(*rows), slice(*heads)]
        .permute(1, 2, 0, 3)
        .to(put.own.dtype)
        .reshape(entry.rows, -1)
        .contiguous()
    )
    for number, row in enumerate(part):
        address = begin.data_ptr() + (entry.to + number * entry.step) * row.itemsize
        ctypes.memmove(address, row.data_ptr(), row.nbytes)


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for counter in ("sent", "copied", "written", "set_flags", "awaited", "pulled"):
        monkeypatch.setattr(InOneProcess, counter, Counter(), raising=False)


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("order", ("zigzag", "uneven"))
@pytest.mark.parametrize(
    "exchange",
    (
        *("direct", "direct-kept", "all-to-all", "all-to-all-kept"),
        *("all-to-all:2+ring", "ring+all-to-all:2", "all-to-all:2+gather"),
    ),
)
def test_receivers_copy_from_message_offsets(exchange: str, order: str) -> None:
    """Also those of an exchange within an exchange, of which some ranks may have none."""
    for heads, bucket, name in CASES:
        for counter in (InOneProcess.sent, InOneProcess.copied, InOneProcess.written, InOneProcess.set_flags):
            counter.clear()
        InOneProcess.awaited.clear()
        pattern, layout = patterns(heads[0])[name], layout_of(order, 21, 4)
        check(pattern, heads, layout, wrap=InOneProcess, bucket=bucket, exchange=exchange)
        assert InOneProcess.sent == InOneProcess.copied and InOneProcess.set_flags == InOneProcess.awaited
        assert bool(InOneProcess.written) == ("all-to-all" in exchange)
        assert InOneProcess.pulled or exchange in ("all-to-all", "all-to-all-kept"), "no message is short"


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("weak", (False, True))
@pytest.mark.parametrize(("keys", "gradients"), [(0, 0), (300, 1000), (2**30, 2**30)])
@pytest.mark.parametrize("order", ("zigzag", "uneven"))
def test_all_ranks_read_alike(
    order: str, keys: int, gradients: int, weak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some messages of a label may be short and others not, and one rank's kernels unable: no other waits for them."""
    monkeypatch.setattr(ring.comm.exchange, "_PULLED_KEYS", keys)
    monkeypatch.setattr(ring.comm.exchange, "_PULLED_GRADIENTS", gradients)
    monkeypatch.setattr(InOneProcess, "weak_rank", 2 if weak else None)
    for heads, bucket, name in CASES:
        check(
            patterns(heads[0])[name],
            heads,
            layout_of(order, 21, 4),
            wrap=InOneProcess,
            bucket=bucket,
            exchange="direct",
        )
    assert InOneProcess.set_flags == InOneProcess.awaited and InOneProcess.sent == InOneProcess.copied
    assert bool(InOneProcess.pulled) == (keys > 0 and not weak)


@pytest.mark.usefixtures("in_one_process")
def test_kernels_read_keys_of_a_forward_and_the_last_gradients() -> None:
    """Others are hidden by the work of their step, which a kernel would slow down."""
    steps = 6  # of a shard of 12 rows and a bucket of 2
    layout = Layout.contiguous(24, 2)

    def step(transport: SimulatedTransport) -> None:
        q, k, v = (torch.randn(1, 12, 1, 4).requires_grad_() for _ in range(3))
        out = plain_call(q, k, v, Pattern.dense(), layout, group=InOneProcess(transport), exchange="direct", bucket=2)
        torch.autograd.grad(out.sum(), (q, k, v))

    Simulation(2, 0).run(step)
    counted = {f"keys and values {number}": 2 for number in range(1, steps + 1)} | {f"gradients {steps}": 2}
    assert InOneProcess.pulled == counted


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_flags_do_not_overlap(ranks: int) -> None:
    flags, peers = Flags(0, [0] * ranks), range(ranks)
    found = [at for peer in peers for at in (flags.ready(0, peer), flags.done(0, peer))]
    found += [flags.share(0, peer) + signals.BYTES * share for peer in peers for share in range(SHARES)]
    assert sorted(found) == list(range(0, Flags.nbytes(ranks), signals.BYTES))


class WithoutMemory(InOneProcess):
    """A rank that learns, when it prepares a call, that there is no memory for its kind."""

    def _new_route(self, outgoing: list[Outgoing], capturing: bool) -> _Route:
        return _Route({}, [], None, by_nccl=True)


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("exchange", ("direct", "all-to-all", "ring+all-to-all:2"))
def test_calls_without_memory_are_sent_by_nccl(exchange: str) -> None:
    """A transport is one-sided until it knows: what a call announces then must be what it sends afterwards."""
    for heads, bucket, name in CASES:
        pattern, layout = patterns(heads[0])[name], layout_of("zigzag", 21, 4)
        check(pattern, heads, layout, wrap=WithoutMemory, bucket=bucket, exchange=exchange)
    assert InOneProcess.sent and not InOneProcess.written


def _observed(transport: SimulatedTransport, case: Case) -> Observation:
    return observe(InOneProcess(transport), case)


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("exchange", ("all-to-all", "all-to-all:2+direct", "ring+all-to-all:2"))
@pytest.mark.parametrize(("order", "cuts"), [("zigzag", None), ("striped", None), ("contiguous", (0, 4, 4, 8, 21))])
def test_bytes_of_puts_equal_the_references(exchange: str, order: str, cuts: tuple[int, ...] | None) -> None:
    """In one stage and in several, with key/value heads in blocks of several ranks."""
    for (heads, kv_heads), bucket in itertools.product(((4, 2), (6, 6)), (1, None)):
        case = plain(
            4, tokens=21, cuts=cuts, order=order, heads=heads, kv_heads=kv_heads, exchange=exchange, bucket=bucket
        )
        found = Simulation(4, 0).run(partial(_observed, case=case))
        assert all(observation.one_sided for observation in found)
        check_traffic(case, prepare(case), found)
        check_buffers(case, prepare(case), found)


@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("kind", [InOneProcess, WithoutMemory])
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_of_links_are_copied(ranks: int, kind: type[InOneProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(links, "transport_of", lambda group: own.transport)
    monkeypatch.setattr(links.dist, "barrier", lambda: None)
    monkeypatch.setattr(InOneProcess, "hosts", (0,) * ranks, raising=False)

    def step(transport: SimulatedTransport) -> list[tuple[list[str], list[links.Timing]]]:
        own.transport = kind(transport)
        assert links.shares_memory()
        return [links.transfers(size, shared=True) for size in (1, 7, 4096, 65_537, 7)]

    found = Simulation(ranks, 0).run(step)
    assert all(not wrong and len(times) == 3 * (kind is InOneProcess) for rank in found for wrong, times in rank)
    assert InOneProcess.sent and (kind is WithoutMemory or InOneProcess.sent == InOneProcess.copied)
