"""Flags in GPU memory that streams set and wait for, across the GPUs of one host.

The GPU's front end executes them in stream order, without a multiprocessor; a waiting kernel would need one that the
attention leaves free. CUDA's driver calls them stream memory operations; torch does not offer them. Copies between GPUs
are here too: torch's take several times as much host time, since each needs tensors and another current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

BYTES = 4  # per flag
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, whose waits and writes have one layout."""

    _fields_ = (
        ("operation", ctypes.c_uint), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64), ("rest", ctypes.c_uint64),
    )  # fmt: skip


def put(address: int, value: int) -> Operation:
    """Write the flag at this address, once all earlier work of the stream is done and visible to other GPUs."""
    return Operation(_WRITE, address, value, 0)


def wait(address: int, value: int) -> Operation:
    """Block later work of the stream until the flag at this address, on its own GPU, has this value."""
    return Operation(_WAIT, address, value, _EQUAL)


class Signals:
    """Operations that a stream executes in order, prepared once and submitted together in every call."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._count = len(operations)
        self._operations = (Operation * self._count)(*operations)

    def __call__(self, stream: torch.cuda.Stream) -> None:
        if self._count:
            error = _batch()(stream.cuda_stream, self._count, self._operations, 0)
            if error:
                raise RuntimeError(f"CUDA's cuStreamBatchMemOp failed with error {error}")


@lru_cache
def _batch() -> Callable[..., int]:
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(Operation), ctypes.c_uint)
    return function


def has_atomics(device: int, peer: int) -> bool:
    """Return True if kernels of a device can add to memory of another in one step, as over NVLink. A driver that cannot
    tell means no: ranks agree on the answer later, so one that raised would leave the others waiting.
    """
    value = ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), _ATOMICS, device, peer)
    return not error and value.value == 1


def copy(to: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
    """Copy `size` bytes from one address to another, in stream order."""
    error = _copy()(to, source, size, stream.cuda_stream)
    if error:
        raise RuntimeError(f"CUDA's cuMemcpyAsync failed with error {error}")


@lru_cache
def _copy() -> Callable[..., int]:
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    function.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return function
