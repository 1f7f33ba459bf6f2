"""Elementwise functions between modules, with the same bits for an element wherever it is.

On CPUs torch computes most elements by vectors, and the last ones, which fill no vector, one by one, by other code with
other bits: of exp, silu, gelu, cos and more. How many are last depends on the tokens of a rank. So tensors of another
size are filled up to whole vectors. Torch's tag `pointwise` tells which functions are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

WHOLE = 64  # elements: two vectors of 16 bits, the longest that a loop of torch takes at once


class WholeVectors(TorchFunctionMode):
    """Fill up tensors of elementwise functions on CPUs to whole vectors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not _is_pointwise(name) or kwargs.get("inplace") or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return _filled(func, args, kwargs)


@lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    """Return True for the name of an elementwise function that writes into no argument."""
    packet = getattr(torch.ops.aten, name.strip("_"), None)
    if packet is None or (name.endswith("_") and not name.startswith("__")):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _filled(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    values, structure = tree_flatten((args, kwargs))
    tensors = [x for x in values if isinstance(x, Tensor)]
    if not tensors or any(x.device.type != "cpu" for x in tensors):
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    size = shape.numel()
    if not shape or size % WHOLE == 0 or not any(x.is_floating_point() for x in tensors):
        return func(*args, **kwargs)

    def fill(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim():
            return x
        return torch.cat((x.expand(shape).reshape(-1), x.new_ones(-size % WHOLE)))

    filled, named = tree_unflatten([fill(x) for x in values], structure)
    result = func(*filled, **named)
    if not isinstance(result, Tensor) or result.shape != (size + -size % WHOLE,):
        return func(*args, **kwargs)  # a reduction of the same name, as max over a dim is
    return result[:size].view(shape)
