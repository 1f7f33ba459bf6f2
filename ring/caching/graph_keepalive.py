"""What captured CUDA graphs read at every replay, and what therefore must not be freed before them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_for_ever: list[object] = []  # by graphs of the user's, of whose end nothing is known here


class _ThreadState(threading.local):
    """Of the graph that this thread captures."""

    found: list[object] | None = None


_kept = _ThreadState()


def keep_alive(what: object) -> None:
    """Keep what the graph that is being captured will read."""
    (_for_ever if _kept.found is None else _kept.found).append(what)


def keep_alive_in_graph(*tables: torch.Tensor) -> None:
    """Keep tables that a cache may forget, if a graph is being captured that reads them."""
    if tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
        keep_alive(tables)


@contextmanager
def keep_alive_for_one_graph() -> Iterator[list[object]]:
    """A list of what the graph that is captured inside reads; it is as long there as the list."""
    found: list[object] = []
    _kept.found = found
    try:
        yield found
    finally:
        _kept.found = None
