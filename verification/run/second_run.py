"""Circumstances of a run: other defaults, inputs at other places in memory, losses that give no gradient or are
differentiated again."""

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
    """torch's meta device is the default, so a tensor that a call makes without naming a device holds no numbers and
    cannot be combined with others. The default applies to the calling thread, and to autograd while it works for it.
    """
    with _caches_of_its_own(), torch.device("meta"):
        yield


@contextmanager
def another_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """That is the type of tensors that a call makes without naming one, of the whole process: simulated ranks share it,
    so what is put back is torch's own default, not what there was.
    """
    with _caches_of_its_own():
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@contextmanager
def _caches_of_its_own() -> Iterator[None]:
    """The ring's caches are emptied before, so that all is made again, and after, so that nothing of it is used."""
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
    """x, through a function that gives None as its gradient, as functions may: what made x is still gone through."""
    return _WithoutGradient.apply(x)


def must_not_be_differentiated(gradient: Tensor, sources: Sequence[Tensor]) -> None:
    """Second derivatives are refused. Raises RuntimeError if they are given, as numbers or as none at all."""
    for source in sources:
        try:
            found = torch.autograd.grad(gradient.sum(), source, retain_graph=True, allow_unused=True)
        except NotImplementedError:
            continue
        raise RuntimeError(f"a second derivative must be refused as NotImplementedError, got {found}")


def in_one_storage(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Equal tensors, of one dtype and device, with the same strides that lie in one storage, in the order given. Each
    takes as much room as its own storage has, NaN where it is not used. Between them is only the padding that keeps
    each aligned as before, so that kernels compute the same bit for bit.
    """
    first = tensors[0]
    block = ALIGNMENT // first.element_size()
    sizes = [math.ceil(x.untyped_storage().nbytes() / ALIGNMENT) * block for x in tensors]
    buffer = first.new_full((sum(sizes),), math.nan)
    found, start = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        place = buffer.as_strided(x.shape, x.stride(), start + x.storage_offset())
        once = tuple(slice(1) if step == 0 else slice(None) for step in x.stride())  # of what is expanded
        place[once].copy_(x.detach()[once])
        found.append(place)
        start += size
    return found
