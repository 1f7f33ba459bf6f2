"""Circumstances of a second run: another default device, inputs at other places in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from verification.run.caches import clear_caches

ALIGNMENT = 256  # bytes, the coarsest by which a kernel or a product is chosen


@contextmanager
def another_default_device() -> Iterator[None]:
    """torch's meta device is the default, so a tensor that a call makes without naming a device holds no numbers and
    cannot be combined with others. The default applies to the calling thread, and to autograd while it works for it.

    The ring's caches are emptied before, so that everything is made again, and after, so that nothing made here reaches
    other calls, which would fail for it.
    """
    clear_caches(("ring",))
    try:
        with torch.device("meta"):
            yield
    finally:
        clear_caches(("ring",))


def in_one_storage(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Equal tensors with the same strides that lie in one storage, in the order given. Each takes as much room as its
    own storage has; the parts of it that a strided tensor does not use are NaN. Between them is only the padding that
    keeps each aligned as before, so that kernels compute the same bit for bit.

    The tensors are of one dtype, on one device.
    """
    first = tensors[0]
    block = ALIGNMENT // first.element_size()
    sizes = [math.ceil(x.untyped_storage().nbytes() / ALIGNMENT) * block for x in tensors]
    buffer = first.new_full((sum(sizes),), math.nan)
    found, start = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        found.append(buffer.as_strided(x.shape, x.stride(), start + x.storage_offset()).copy_(x.detach()))
        start += size
    return found
