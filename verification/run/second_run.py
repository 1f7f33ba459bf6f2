"""In what circumstances a second run is made: another default device, other places of its inputs in memory."""

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
    """torch's meta device is the default: a tensor made for a call without a word of its device holds no numbers, and
    goes with no other. The default is the calling thread's, and autograd's while it works for that.

    The ring's caches are emptied before, since what an ordinary run left there is not made again, and after, since what
    is made here must not reach other calls, which would fail in its place.
    """
    clear_caches(("ring",))
    try:
        with torch.device("meta"):
            yield
    finally:
        clear_caches(("ring",))


def in_one_storage(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Equal tensors with the same strides, whose numbers lie in one storage, in the order given: each with all that its
    own storage holds, that of strided ones filled with NaN where they have nothing. Nothing lies between them but what
    it takes that each is aligned as before, so that kernels do the same bit for bit.

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
