"""A meter of a call's memory: it watches the inputs and outputs of torch's operations, within `ring.attention` too."""

from __future__ import annotations

import resource
import sys
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring.dispatcher_op import run_prepared


@dataclass(frozen=True)
class Workspace:
    """The memory use of one forward or backward.

    largest   bytes of the largest tensor that an operation made; integers, which are positions, do not count
    products  numbers of vectors on the two sides of each matrix product with vectors of a head dim, batch and folds
              included, the smaller first, since the sides do not show which one is the keys
    """

    largest: int
    products: frozenset[tuple[int, int]]


class Meter(TorchDispatchMode):
    """A dispatch mode that watches the operations of one thread, forward and backward.

    held, peak: bytes of the live tensors that operations inside made or `count` was given: now, and at most so far.
    Scratch memory inside torch's kernels is not seen.
    """

    def __init__(self, *head_dims: int) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._dims = set(head_dims)
        self._largest = 0
        self._products: set[tuple[int, int]] = set()
        self._known: set[int] = set()  # storages counted in `held`

    def take(self) -> Workspace:
        """Return what was seen since the last call, and start again."""
        workspace = Workspace(self._largest, frozenset(self._products))
        self._largest, self._products = 0, set()
        return workspace

    def count(self, x: Tensor) -> None:
        """Count the storage of x, once, until it is freed."""
        storage = x.untyped_storage()
        identity = storage._cdata
        if identity not in self._known:
            self._known.add(identity)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._freed, identity, storage.nbytes())

    def _freed(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.held -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ring.attention.default:  # a custom operator: meter the operations inside it
            with self:
                return run_prepared(*args)
        if _composed(func):  # inside an operator, composite operations arrive undecomposed
            with self:
                return func.decompose(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        for result in (results,) if isinstance(results, Tensor) else tree_leaves(results):
            if isinstance(result, Tensor):
                self.count(result)
        makes, multiplies = _kind(func)
        if makes:
            for x in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(x, Tensor) and (x.is_floating_point() or x.dtype is torch.bool):
                    self._largest = max(self._largest, x.numel() * x.element_size())
        if multiplies is not None:
            self._multiplied(args[multiplies], args[multiplies + 1])
        return results

    def _multiplied(self, a: Tensor, b: Tensor) -> None:
        if a.dim() == 4:  # fused: queries and keys, (batch, heads, length, head dim)
            few, many = sorted((a.numel() // a.shape[3], b.numel() // b.shape[3]))
        else:  # (batch, M, K) and (batch, K, N), or without batch
            sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
            if self._dims.isdisjoint(sizes):
                return
            sizes.remove(max(self._dims & set(sizes)))  # if both head dims occur, one may be a number of vectors
            few, many = sorted(size * (a.shape[0] if a.dim() == 3 else 1) for size in sizes)
        self._products.add((few, many))


@cache
def _composed(func: Any) -> bool:
    """True if an operation is a composite of others on all devices, as `matmul` is."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@cache
def _kind(func: Any) -> tuple[bool, int | None]:
    """Return (True if the operation makes new tensors, index of the first matrix if it multiplies matrices)."""
    returns = func._schema.returns
    makes = bool(returns) and all(x.alias_info is None for x in returns)
    name = func._schema.name.removeprefix("aten::")
    if "scaled_dot_product" in name:
        return makes, 1 if name.endswith("backward") else 0
    return makes, {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}.get(name)


def process_peak(device: torch.device | None = None) -> int:
    """Peak bytes in use so far: by torch's allocator on that GPU, otherwise by this process, torch included."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
