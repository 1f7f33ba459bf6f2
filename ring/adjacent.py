"""Places tensors of any shapes and types next to each other in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

Form = tuple[Sequence[int], torch.dtype]  # shape and type of a tensor

_ALIGNMENT = 512  # bytes; as in torch's allocator


def bytes_of(forms: Sequence[Form]) -> int:
    """Return the bytes of a buffer of tensors of these forms."""
    return _edges(forms)[-1]


def adjacent(buffer: torch.Tensor, forms: Sequence[Form]) -> list[torch.Tensor]:
    """View the front of a buffer, (bytes,) uint8, as tensors of these forms."""
    places = zip(_edges(forms), forms, strict=False)
    return [buffer[at : at + _nbytes(shape, dtype)].view(dtype).view(*shape) for at, (shape, dtype) in places]


def joined(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Copy tensors to a new buffer, on the device of `like`. A single one, which is contiguous, is viewed."""
    if len(tensors) == 1:
        return tensors[0].view(torch.uint8).flatten()
    forms = [(x.shape, x.dtype) for x in tensors]
    buffer = like.new_empty(bytes_of(forms), dtype=torch.uint8)
    for view, x in zip(adjacent(buffer, forms), tensors, strict=True):
        view.copy_(x)
    return buffer


def _edges(forms: Sequence[Form]) -> list[int]:
    """Return where each tensor begins, and the end."""
    return list(accumulate((-(-_nbytes(*form) // _ALIGNMENT) * _ALIGNMENT for form in forms), initial=0))


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return dtype.itemsize * torch.Size(shape).numel()
