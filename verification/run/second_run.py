"""Variations of a run: other torch defaults, inputs in one storage, losses without a gradient, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verification.run.caches import clear_caches

ALIGNMENT = 256  # bytes, the coarsest by which a kernel or a product is chosen


@contextmanager
def another_default_device() -> Iterator[None]:
    """Make torch's meta device the default of this thread, and of autograd while it works for it.

    A tensor that a call makes without naming a device then holds no numbers and cannot be combined with others.
    """
    with _empty_ring_caches(), torch.device("meta"):
        yield


@contextmanager
def another_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make this the default type of the process. Restores float32, torch's own, since simulated ranks share it."""
    with _empty_ring_caches():
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@contextmanager
def sums_in_fixed_order() -> Iterator[None]:
    """Make kernels sum in the same order in every run."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _empty_ring_caches() -> Iterator[None]:
    """Empty the ring's caches before, so that all is computed again, and after, so that nothing of it is reused."""
    clear_caches(("ring",))
    try:
        yield
    finally:
        clear_caches(("ring",))


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def without_gradient(x: Tensor) -> Tensor:
    """Identity whose backward returns None; the graph behind it still runs."""
    return _WithoutGradient.apply(x)


def must_not_be_differentiated(gradient: Tensor, sources: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless a second derivative is refused with NotImplementedError."""
    for source in sources:
        try:
            second = torch.autograd.grad(gradient.sum(), source, retain_graph=True, allow_unused=True)
        except NotImplementedError:
            continue
        raise RuntimeError(f"a second derivative must be refused as NotImplementedError, got {second}")


def in_one_storage(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one dtype and device into one storage, in order, with the same strides.

    Each takes as many bytes as its old storage; unused ones are NaN. Padding keeps each aligned as before, so that
    kernels compute the same bits.
    """
    first = tensors[0]
    block = ALIGNMENT // first.element_size()
    sizes = [math.ceil(x.untyped_storage().nbytes() / ALIGNMENT) * block for x in tensors]
    buffer = first.new_full((sum(sizes),), math.nan)
    views, start = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        view = buffer.as_strided(x.shape, x.stride(), start + x.storage_offset())
        unexpanded = tuple(slice(1) if step == 0 else slice(None) for step in x.stride())
        view[unexpanded].copy_(x.detach()[unexpanded])
        views.append(view)
        start += size
    return views
