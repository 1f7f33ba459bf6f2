"""Settings of the process that an implementation must leave as they were: a user's later code would run under them."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.backends import cudnn
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled, math_sdp_enabled, mem_efficient_sdp_enabled

from verification.failures import Malformed

# Begins of the names of environment variables that torch.distributed, CUDA and threads heed.
_VARIABLES = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "MKL_")
_SHOWN = 80  # characters of values that are told
_smallest = sys.float_info.min


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _set_variables(values: dict[str, str]) -> None:
    for name in _variables():
        del os.environ[name]
    os.environ.update(values)


def _sdp_kernels() -> tuple[bool, ...]:
    return flash_sdp_enabled(), mem_efficient_sdp_enabled(), math_sdp_enabled(), cudnn_sdp_enabled()


def _set_sdp_kernels(enabled: tuple[bool, ...]) -> None:
    for name, on in zip(("flash", "mem_efficient", "math", "cudnn"), enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def _of_gpu(read: Callable[[], Any]) -> Any:
    return read() if torch.cuda.is_initialized() else None


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _numpy_numbers() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one
    return name, np.asarray(keys).tobytes(), *rest


def _set_numpy_numbers(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002


# By name: reads the setting, and sets it. A setting that is None before a call is not compared.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on CPUs": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on GPUs": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "autocast's dtype on CPUs": (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    "autocast's dtype on GPUs": (partial(torch.get_autocast_dtype, "cuda"), partial(torch.set_autocast_dtype, "cuda")),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of fp32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "subnormal numbers": (lambda: _smallest / 2 > 0, lambda kept: torch.set_flush_denormal(not kept)),
    "cuDNN's benchmark": (lambda: cudnn.benchmark, partial(setattr, cudnn, "benchmark")),
    "cuDNN's determinism": (lambda: cudnn.deterministic, partial(setattr, cudnn, "deterministic")),
    "cuDNN's TF32": (lambda: cudnn.allow_tf32, partial(setattr, cudnn, "allow_tf32")),
    "kernels of scaled_dot_product_attention": (_sdp_kernels, _set_sdp_kernels),
    "the GPU": (partial(_of_gpu, torch.cuda.current_device), torch.cuda.set_device),
    "torch's random numbers": (lambda: _bytes(torch.get_rng_state()), lambda x: torch.set_rng_state(_tensor(x))),
    "a GPU's random numbers": (
        partial(_of_gpu, lambda: _bytes(torch.cuda.get_rng_state())), lambda x: torch.cuda.set_rng_state(_tensor(x)),
    ),
    "NumPy's random numbers": (_numpy_numbers, _set_numpy_numbers),
    "Python's random numbers": (random.getstate, random.setstate),
    "NumPy's handling of errors": (np.geterr, lambda actions: np.seterr(**actions)),
    "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the working directory": (os.getcwd, os.chdir),
    "environment variables": (_variables, _set_variables),
}  # fmt: skip


@contextmanager
def left_as_they_were(function: str) -> Iterator[None]:
    """Restore the settings that the block changes, then raise Malformed, which names them and the function."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    changed = {}
    try:
        yield
    finally:
        for name, (read, write) in SETTINGS.items():
            if before[name] is not None and (after := read()) != before[name]:
                values = f"{before[name]} -> {after}"
                changed[name] = f"{name} {values}" if len(values) < _SHOWN else name
                write(before[name])
    if changed:
        hint = "; to draw random numbers, write `with torch.random.fork_rng():`" if "random" in str(changed) else ""
        raise Malformed(
            f"{function} changed settings of the process: {', '.join(changed.values())}; "
            f"it must leave them as they were{hint}"
        )
