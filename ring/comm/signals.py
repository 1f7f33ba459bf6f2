"""Flags in GPU memory that streams set and wait for, across the GPUs of one host.

The GPU's front end sets and waits in stream order, without a multiprocessor. A kernel that waited for another GPU would
first have to wait for a multiprocessor that the attention, with which it should overlap, leaves free. CUDA's driver
calls them stream memory operations; torch does not offer them. Copies between GPUs are here too: torch's take the host
several times as long, since each needs tensors and another current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
BYTES = 4  # of a flag


@lru_cache
def _function(name: str, *arguments: type[ctypes._SimpleCData[int]]) -> Callable[..., int]:
    found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    found.argtypes = arguments
    return found


def put(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Write the flag at that address, once all earlier work of the stream is done and can be seen by others."""
    write = _function("cuStreamWriteValue32_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    _check("cuStreamWriteValue32", write(stream.cuda_stream, address, value, 0))


def wait(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Hold up later work of the stream until the flag at that address, on its own GPU, is that value."""
    hold = _function("cuStreamWaitValue32_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    _check("cuStreamWaitValue32", hold(stream.cuda_stream, address, value, _EQUAL))


def copy(to: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Copy so many bytes from one address to another, in the stream's order."""
    move = _function("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    _check("cuMemcpyAsync", move(to, source, size, stream.cuda_stream))


def _check(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA's {name} failed with error {error}")
