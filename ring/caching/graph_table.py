"""Tables of a captured CUDA graph, written once, while it is captured.

A copy inside the graph would run at every replay, and the kernel that reads the table would wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from ring.caching.graph_keepalive import keep_alive, stream_of_replays

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def graph_table(numbers: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy numbers to a GPU whose current stream is captured. The copy is there when this returns, in memory that the
    graph's kernels never write, for as long as the graph lives.
    """
    with _relaxed(), torch.cuda.stream(stream_of_replays(device)):
        table = torch.from_numpy(numbers).to(device)
    keep_alive(table)
    return table


@contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread wait for other streams than the captured one. Most captures refuse that by default."""
    mode = _exchange_mode(_RELAXED)
    try:
        yield
    finally:
        _exchange_mode(mode)


def _exchange_mode(mode: int) -> int:
    """Set how strict captures are with this thread. Returns the mode before."""
    value = ctypes.c_int(mode)
    error = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    if error:
        raise RuntimeError(f"CUDA's cuThreadExchangeStreamCaptureMode failed with error {error}")
    return value.value
