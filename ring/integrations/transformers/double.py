"""Arithmetic in fp64, operation by operation, for a model in any precision and without a copy of it.

A mode of functions would miss TorchScript, autocast and what functions do inside. Nothing is compiled in this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WIDE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip
CONVOLUTIONS = (
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
)  # fmt: skip


@contextmanager
def in_double(instead: dict[int, Tensor]) -> Iterator[None]:
    """Compute every operation of the block in fp64, whatever types its tensors have and ask for.

    Args:
        instead: values of parameters, by id, as of `instead_of_zeros`.
    """
    double = _Double(instead)
    with _Convolutions(double), double:
        yield


def instead_of_zeros(model: nn.Module) -> dict[int, Tensor]:
    """Return small random numbers for each parameter of zeros alone, which would hide what it gates, by its id.

    Args:
        model: any.
    """
    instead = {}
    for number, (_, x) in enumerate(model.named_parameters()):
        if x.dtype in (*WIDE, torch.float64) and not bool(x.any()):
            draw = torch.Generator().manual_seed(number)
            wide = torch.randn(x.shape, dtype=torch.float64, generator=draw) * 0.02
            instead[id(x)] = wide.to(x.device, WIDE.get(x.dtype, x.dtype))
    return instead


class _Double(TorchDispatchMode):
    """Computes each operation in fp64.

    Args:
        instead: values of parameters, by id.
    """

    def __init__(self, instead: dict[int, Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default and id(args[0]) not in self._instead:
            return self.wide(func(*args, **(kwargs or {})))  # the rows alone, not the table
        written = {x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write}
        names = [x.name for x in func._schema.arguments]
        args = [x if name in written else self.wide(x) for name, x in zip(names, args, strict=False)]
        kwargs = {name: x if name in written else self.wide(x) for name, x in (kwargs or {}).items()}
        out = func(*args, **kwargs)
        return out if written else self.wide(out)

    def wide(self, x: Any) -> Any:
        """Return an argument in fp64; lists of them too."""
        if isinstance(x, Tensor):
            instead = self._instead.get(id(x))
            return x.to(WIDE.get(x.dtype, x.dtype)) if instead is None else instead
        if isinstance(x, torch.dtype):
            return WIDE.get(x, x)
        return type(x)(map(self.wide, x)) if type(x) in (list, tuple) else x


class _Convolutions(TorchFunctionMode):
    """Converts the arguments of convolutions, which compare types before operations are dispatched."""

    def __init__(self, double: _Double) -> None:
        super().__init__()
        self._double = double

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in CONVOLUTIONS:
            return func(*args, **kwargs)
        return func(*self._double.wide(list(args)), **{name: self._double.wide(x) for name, x in kwargs.items()})
