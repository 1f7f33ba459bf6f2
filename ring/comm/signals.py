"""Flags in GPU memory that streams set and wait for, across the GPUs of one host.

The GPU's front end sets and waits in stream order, without a multiprocessor. A kernel that waited for another GPU would
first have to wait for a multiprocessor that the attention, with which it should overlap, leaves free. CUDA's driver
calls them stream memory operations; torch does not offer them.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
BYTES = 4  # of a flag


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def put(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Write the flag at that address, once all earlier work of the stream is done and can be seen by others."""
    _call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream.cuda_stream), address, value, 0)


def wait(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Hold up later work of the stream until the flag at that address, on its own GPU, is that value."""
    _call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream.cuda_stream), address, value, _EQUAL)


def _call(name: str, stream: ctypes.c_void_p, address: int, value: int, flags: int) -> None:
    error = getattr(_driver(), name)(stream, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags))
    if error:
        raise RuntimeError(f"CUDA's {name} failed with error {error}")
