"""Keeps alive the objects that captured CUDA graphs read at every replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_forever: list[object] = []  # read by graphs that the user captured: we never learn when those are freed


class _ThreadState(threading.local):
    """Objects read by the graph that this thread captures; None: by a graph of the user's."""

    objects: list[object] | None = None


_state = _ThreadState()


def keep_alive(read: object) -> None:
    """Keep an object alive that the graph being captured reads."""
    (_forever if _state.objects is None else _state.objects).append(read)


def keep_alive_in_graph(*tables: torch.Tensor) -> None:
    """Keep tables alive that a cache may evict, if a graph is being captured."""
    if tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
        keep_alive(tables)


@contextmanager
def keep_alive_for_one_graph() -> Iterator[list[object]]:
    """Collect what the graph captured inside reads, alive as long as the yielded list."""
    objects: list[object] = []
    _state.objects = objects
    try:
        yield objects
    finally:
        _state.objects = None
