"""Rule for symmetric memory that captured CUDA graphs keep alive, on a machine without GPUs."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from ring.caching import graph_keepalive
from ring.caching.bounded_cache import BoundedCache
from ring.caching.graph_keepalive import keep_alive_for_one_graph
from ring.comm import symmetric_memory
from ring.comm.symmetric_memory import SymmetricTransport, _Route

KINDS = 3  # of calls of which a transport here knows the routes


class OnNoGPU(SymmetricTransport):
    """A transport whose ranks have exchanged the addresses of their buffers."""

    def __init__(self) -> None:
        self._routes = BoundedCache(KINDS)
        self._streams = SimpleNamespace(side=SimpleNamespace(device=None))  # type: ignore[assignment]
        self.by_nccl = False
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


def test_a_route_is_made_once_and_forgotten_after_many_others(transport: OnNoGPU) -> None:
    route = prepared(transport, 0)
    assert prepared(transport, 0)() is route() is not None and transport.made == 1
    forget(transport)
    assert route() is None


def test_a_route_is_there_as_long_as_the_graph_that_replays_it(transport: OnNoGPU) -> None:
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


def test_a_route_in_a_graph_of_the_user_is_there_forever(transport: OnNoGPU) -> None:
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
