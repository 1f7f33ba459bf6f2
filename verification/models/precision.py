"""fp64 throughout a model: many models compute norms and positions in fp32 whatever the dtype of their parameters.

Rounding of 1e-8 would hide small defects, and may differ between shards. So float32 becomes float64 in every call, by a
mode that torch.compile traces: it skips, or leaves in fp32, what is under a mode of operations
(`ring.integrations.transformers.double`), which in turn needs no parameters in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verification.case import DTYPES


class Fp64(TorchFunctionMode):
    """Passes float64 to torch's functions in place of float32."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if any(x is torch.float32 for x in args):
            args = tuple(_wide(x) for x in args)
        return func(*args, **{name: _wide(x) for name, x in kwargs.items()}) if kwargs else func(*args)


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Make the dtype torch's default, and in fp64 the only one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        if dtype == "float64":
            with Fp64() as mode, _in_backward(mode):
                yield
        else:
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _in_backward(mode: Fp64) -> Iterator[None]:
    """Keep the mode in forwards that a backward recomputes: torch leaves a mode while it calls a function."""
    run: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", run_in_mode):
        yield
