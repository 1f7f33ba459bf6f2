"""Flags in GPU memory that streams set and wait for, across the GPUs of one host.

The GPU's front end sets and waits in stream order, without a multiprocessor. A kernel that waited for another GPU would
first have to wait for a multiprocessor that the attention, with which it should overlap, leaves free. CUDA's driver
calls them stream memory operations; torch does not offer them. Copies between GPUs are here too: torch's take the host
several times as long, since each needs tensors and another current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

BYTES = 4  # of a flag
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, of which waits and writes are laid out alike."""

    _fields_ = (
        ("operation", ctypes.c_uint), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64), ("rest", ctypes.c_uint64),
    )  # fmt: skip


def put(address: int, value: int) -> _Operation:
    """Write the flag at that address, once all earlier work of the stream is done and can be seen by others."""
    return _Operation(_WRITE, address, value, 0)


def wait(address: int, value: int) -> _Operation:
    """Hold up later work of the stream until the flag at that address, on its own GPU, is that value."""
    return _Operation(_WAIT, address, value, _EQUAL)


class Signals:
    """Operations that a stream does one after the other, given to it at once; prepared, since they are the same in
    every call.
    """

    def __init__(self, operations: Sequence[_Operation]) -> None:
        self._count = len(operations)
        self._operations = (_Operation * self._count)(*operations)

    def __call__(self, stream: torch.cuda.Stream) -> None:
        if self._count:
            error = _batch()(stream.cuda_stream, self._count, self._operations, 0)
            if error:
                raise RuntimeError(f"CUDA's cuStreamBatchMemOp failed with error {error}")


@lru_cache
def _batch() -> Callable[..., int]:
    found = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    found.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(_Operation), ctypes.c_uint)
    return found


def copy(to: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Copy so many bytes from one address to another, in the stream's order."""
    error = _copy()(to, source, size, stream.cuda_stream)
    if error:
        raise RuntimeError(f"CUDA's cuMemcpyAsync failed with error {error}")


@lru_cache
def _copy() -> Callable[..., int]:
    found = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    found.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return found
