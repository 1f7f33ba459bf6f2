"""Side effects that a call of an implementation must not have: changed settings of its process, and leaks."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.backends import cuda

from verification.failures import Malformed
from verification.run.processes.process_tree import descendants
from verification.wording import counted

# Set by torch's compiler and profiler, Triton and JAX themselves, at the first call that needs them.
OF_LIBRARIES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "TORCH_WARM_POOL", "TEARDOWN_CUPTI", "TPU_")
OPTIONS = (  # of torch.backends
    "cudnn.allow_tf32", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "mkldnn.enabled", "fp32_precision",
    "cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision", "cuda.matmul.allow_fp16_accumulation",
    *(f"cuda.matmul.allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
)  # fmt: skip
SHOWN = 80  # characters of a setting's values
CALLS = 3  # a cache that grows at its first calls is no leak
_smallest = sys.float_info.min


def _gpu(of: Callable[[], Any]) -> Any:
    return of() if torch.cuda.is_initialized() else None


def _readable(of: Callable[[], Any]) -> Any:
    with suppress(RuntimeError):  # torch reads no precision that was set by both of its interfaces
        return of()


def _option(path: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    owner, _, name = f"backends.{path}".rpartition(".")
    module = attrgetter(owner)(torch)
    return partial(_readable, partial(getattr, module, name)), partial(setattr, module, name)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_LIBRARIES)}


def _restore_environment(before: dict[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


# By name: reads the setting, and sets it. One that is None before a call is not compared.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on CPUs": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on GPUs": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "autocast's dtype on CPUs": (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    "autocast's dtype on GPUs": (partial(torch.get_autocast_dtype, "cuda"), partial(torch.set_autocast_dtype, "cuda")),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of fp32 products": (
        partial(_readable, torch.get_float32_matmul_precision), torch.set_float32_matmul_precision,
    ),
    **{f"torch.backends.{path}": _option(path) for path in OPTIONS},
    "subnormal numbers": (lambda: _smallest / 2 > 0, lambda kept: torch.set_flush_denormal(not kept)),
    "SDPA's flash kernels": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "SDPA's efficient kernels": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "SDPA's cuDNN kernels": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "SDPA's plain products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "SDPA's 16-bit sums": (cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
    "the current GPU": (partial(_gpu, torch.cuda.current_device), torch.cuda.set_device),
    "torch's random numbers": (
        lambda: torch.get_rng_state().tolist(), lambda x: torch.set_rng_state(torch.ByteTensor(x)),
    ),
    "a GPU's random numbers": (
        partial(_gpu, lambda: torch.cuda.get_rng_state().tolist()),
        lambda x: torch.cuda.set_rng_state(torch.ByteTensor(x)),
    ),
    "NumPy's random numbers": (
        lambda: pickle.dumps(np.random.get_state()), lambda x: np.random.set_state(pickle.loads(x)),  # noqa: NPY002
    ),
    "Python's random numbers": (random.getstate, random.setstate),
    "NumPy's handling of errors": (np.geterr, lambda actions: np.seterr(**actions)),
    "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the working directory": (os.getcwd, os.chdir),
    "environment variables": (_environment, _restore_environment),
    "filters of warnings": (lambda: [*warnings.filters], partial(setattr, warnings, "filters")),
    "the handler of SIGTERM": (partial(signal.getsignal, signal.SIGTERM), partial(signal.signal, signal.SIGTERM)),
    "the handler of SIGINT": (partial(signal.getsignal, signal.SIGINT), partial(signal.signal, signal.SIGINT)),
}  # fmt: skip


@contextmanager
def left_as_they_were(function: str) -> Iterator[None]:
    """Restore the settings that the block changes, then raise Malformed, which names them and the function."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    changed = {}
    try:
        yield
    finally:
        after = {name: read() for name, (read, _) in SETTINGS.items()}
        for name, (read, write) in SETTINGS.items():
            if before[name] is not None and after[name] != before[name]:
                pairs = (before[name], after[name]), (after[name], before[name])
                values = " -> ".join(str(dict(x.items() - y.items()) if isinstance(x, dict) else x) for x, y in pairs)
                changed[name] = f"{name} {values}" if len(values) < SHOWN else name
            if before[name] is not None and read() != before[name]:  # or changed by restoring another one
                write(before[name])
    if changed:
        raise Malformed(
            f"{function} changed settings of the process: {', '.join(changed.values())}; it must leave them as they "
            "were (random numbers: `with torch.random.fork_rng():`)"
        )


def _live(kind: type) -> int:
    return sum(issubclass(type(x), kind) for x in gc.get_objects())  # isinstance may ask a proxy, which acts


def _plain_tensors() -> list[torch.Tensor]:
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided]


COUNTS: dict[str, Callable[[], int]] = {
    "tensor": partial(_live, torch.Tensor),
    "storage": partial(_live, torch.UntypedStorage),
    "autograd node": partial(_live, torch.autograd.graph.Node),  # it may keep tensors
    "thread": threading.active_count,
    "open file": lambda: len(os.listdir("/proc/self/fd")),
    "child": lambda: len(descendants(os.getpid())),
}


def must_leave_nothing(function: str, call: Callable[[], object]) -> None:
    """Call CALLS times. Raises Malformed if the number of anything in COUNTS grows with every call."""
    gc.collect()
    existing = _plain_tensors()  # they may grow
    gc.freeze()  # what exists is not counted, and costs no time
    counts = []
    for number in range(CALLS + 1):
        if number:
            call()
            gc.collect()
        storages = [x.untyped_storage() for x in (*existing, *_plain_tensors())]
        size = sum({x._cdata: x.nbytes() for x in storages}.values())
        counts.append([*(count() for count in COUNTS.values()), size])
    growth = np.diff(counts, axis=0).min(0).tolist()
    left = [f"{counted(more, name)} more" for name, more in zip((*COUNTS, "byte"), growth, strict=True) if more > 0]
    if left:
        raise Malformed(f"{function} leaves {', '.join(left)} after each call on the same Case; it must leave none")
