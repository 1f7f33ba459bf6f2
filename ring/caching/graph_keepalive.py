"""Keeps alive the objects that captured CUDA graphs read at every replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

_forever: list[object] = []  # read by graphs that the user captured: we never learn when those are freed


class _ThreadState(threading.local):
    """Objects read by the graph that this thread captures, and the stream on which it is replayed; None: a graph of the
    user's.
    """

    objects: list[object] | None = None
    stream: torch.cuda.Stream | None = None


_state = _ThreadState()


def keep_alive(read: object) -> None:
    """Keep an object alive that the graph being captured reads."""
    (_forever if _state.objects is None else _state.objects).append(read)


def keep_alive_in_graph(*tables: torch.Tensor) -> None:
    """Keep tables alive that a cache may evict, if a graph is being captured."""
    if tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
        keep_alive(tables)


@contextmanager
def keep_alive_for_one_graph(stream: torch.cuda.Stream | None = None) -> Iterator[list[object]]:
    """Collect what the graph captured inside reads, alive as long as the yielded list. stream: of its replays."""
    objects: list[object] = []
    _state.objects, _state.stream = objects, stream
    try:
        yield objects
    finally:
        _state.objects = _state.stream = None


def stream_of_replays(device: torch.device) -> torch.cuda.Stream:
    """Return a stream for writing what the graph being captured reads. Once that is freed, the next write there runs
    after the last replay. A graph of the user's runs on any stream, but what it reads is never freed.
    """
    return _side_stream(device) if _state.stream is None else _state.stream


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
