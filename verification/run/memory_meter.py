"""How much memory a call may take, and the meter for it.

What has to hold is O(n / p) memory, and that a bucket bounds a kernel call. The meter neither patches nor knows the
inside of a call: it looks at the tensors that operations take and make.
"""

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

from reference.call_limits import LEAST_ROWS
from ring.custom_op import run_prepared
from verification.case import Case

LEAST_BLOCK = 8  # query rows whose scores may exist at a time, whatever their size


@dataclass(frozen=True)
class Workspace:
    """What one forward or backward took.

    largest   bytes of the largest tensor that an operation made. Integers are not counted: they are positions
    products  of matrix products that contract or make vectors of the head dim, the numbers of vectors on either
              side, batch and folds counted in, the smaller number first: which side are the keys does not show
    """

    largest: int
    products: frozenset[tuple[int, int]]


class Meter(TorchDispatchMode):
    """Watches the operations of one thread, forward and backward.

    held, peak: bytes of all tensors, as long as they live, that operations inside made or `count` was told of: now, and
    at most at any time. Scratch inside one of torch's kernels is not seen.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._dim = head_dim
        self._largest = 0
        self._products: set[tuple[int, int]] = set()
        self._known: set[int] = set()  # storages that are counted

    def take(self) -> Workspace:
        """What was seen since the last time."""
        taken = Workspace(self._largest, frozenset(self._products))
        self._largest, self._products = 0, set()
        return taken

    def count(self, x: Tensor) -> None:
        """Counts the storage of x, once, until nobody holds it any more."""
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
        if func is torch.ops.ring.attention.default:  # one operator to others: the meter looks into it
            with self:
                return run_prepared(*args)
        if _composed(func):  # what is called within an operator has not been taken apart yet
            with self:
                return func.decompose(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        for result in (results,) if isinstance(results, Tensor) else tree_leaves(results):
            if isinstance(result, Tensor):
                self.count(result)
        makes, multiplies = _kind(func)
        if makes:
            for made in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(made, Tensor) and (made.is_floating_point() or made.dtype is torch.bool):
                    self._largest = max(self._largest, made.numel() * made.element_size())
        if multiplies is not None:
            self._multiplied(args[multiplies], args[multiplies + 1])
        return results

    def _multiplied(self, a: Tensor, b: Tensor) -> None:
        if a.dim() == 4:  # fused: queries and keys, (batch, heads, length, head dim)
            few, many = sorted((a.numel() // a.shape[3], b.numel() // b.shape[3]))
        else:  # (batch, M, K) and (batch, K, N), or without batch
            sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
            if self._dim not in sizes:
                return
            sizes.remove(self._dim)
            few, many = sorted(size * (a.shape[0] if a.dim() == 3 else 1) for size in sizes)
        self._products.add((few, many))


@cache
def _composed(func: Any) -> bool:
    """Whether an operation is made of others for all devices alike, as `matmul` is."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@cache
def _kind(func: Any) -> tuple[bool, int | None]:
    """Whether an operation makes new tensors; and, of those that multiply matrices, which argument is the first."""
    returns = func._schema.returns
    makes = bool(returns) and all(x.alias_info is None for x in returns)
    name = func._schema.name.removeprefix("aten::")
    if "scaled_dot_product" in name:
        return makes, 1 if name.endswith("backward") else 0
    return makes, {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}.get(name)


def process_peak(device: torch.device | None = None) -> int:
    """The most bytes in use so far: of torch's allocator on that GPU, otherwise of this process with torch itself."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class WorkspaceLimits:
    """Of one rank: vectors in a kernel call, and bytes of any tensor."""

    query_vectors: int
    key_vectors: int
    forward: int
    backward: int


def limits(case: Case, index: int, buffer_forward: int, buffer_backward: int) -> WorkspaceLimits:
    """What rank `index` of the group may take. The buffers are its communication buffers, in bytes, all together.

    With b the bucket, n_r the rank's tokens, n all, w bytes of the accumulator's type:

    A kernel call takes at most b key tokens, so B Hk b key vectors, and max(b, 16) query rows, so B H max(b, 16)
    query vectors: folds and joined ranges of keys count in full. Tensors that may exist are

        the rank's queries, their output or gradient, or a part of them          B n_r H D w
        the keys of a call, copied or as gradients                               B min(b, n) Hk D w
        scores of a call: no more than its queries have numbers, or of 8 rows    B 8 H min(b, n) w
        a communication buffer                                                   at most all of them together

    Softmax weights are scores; masks are no larger; keys of the own shard are no more than its queries. No tensor of
    n_r n, or of n_r n_r, numbers fits in this once a shard is long.
    """
    b, n, mine = case.tokens_per_call, case.tokens, case.shards().counts[index]
    call = case.batch * min(b, n)  # key tokens
    most = case.accumulator_dtype.itemsize * max(
        case.batch * mine * case.heads * case.head_dim,
        call * case.kv_heads * case.head_dim,
        call * case.heads * LEAST_BLOCK,
    )
    queries, keys = case.batch * case.heads * max(b, LEAST_ROWS), case.batch * case.kv_heads * b
    return WorkspaceLimits(queries, keys, max(most, buffer_forward), max(most, buffer_backward))
